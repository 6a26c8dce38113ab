"""Corpus: five formats, what is supervised in each, what is skipped, where errors are."""

import json

import numpy as np
import pytest

from dflash_cache.corpus import load_tokenizer, read_corpus, read_prompts
from dflash_cache.errors import DataError, UsageError
from tests.helpers import CHATML, tiny_tokenizer
from tests.tiny_models import tiny_dense

USER = {"role": "user", "content": "What is the answer?"}
ANSWER = {"role": "assistant", "content": "The answer is forty-two."}
THINK = CHATML.replace(
    "<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<t>\n{% endif %}"
)


@pytest.fixture
def write(tmp_path):
    def write(*lines):
        path = tmp_path / "corpus.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
        return path

    return write


def supervised(tokenizer, document):
    return tokenizer.decode(document.input_ids[document.loss_mask == 1])


def test_all_tokens_of_a_text_are_supervised(write):
    tokenizer = tiny_tokenizer()
    (document,), report = read_corpus(write({"text": "The quick brown fox"}), tokenizer)
    assert document.input_ids.dtype == np.int32
    assert document.loss_mask.dtype == np.uint8
    assert supervised(tokenizer, document) == "The quick brown fox"
    assert (document.source, document.line) == ("corpus.jsonl", 1)
    assert report.tokens == report.supervised == len(document.input_ids)


@pytest.mark.parametrize(
    "record",
    [
        {"messages": [USER, ANSWER]},
        {
            "conversations": [
                {"from": "human", "value": USER["content"]},
                {"from": "gpt", "value": ANSWER["content"]},
            ]
        },
        {"prompt": [USER], "response": ANSWER["content"]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": USER["content"]}]},
                ANSWER,
            ]
        },
    ],
)
def test_of_a_chat_only_the_answer_with_its_end_is_supervised(write, record):
    tokenizer = tiny_tokenizer()
    (document,), _ = read_corpus(write(record), tokenizer)
    assert supervised(tokenizer, document) == "The answer is forty-two.<|im_end|>\n"
    assert tokenizer.decode(document.input_ids) == tokenizer.apply_chat_template(
        [USER, ANSWER], tokenize=False
    )


def test_a_prompt_beside_messages_is_the_chats_own_first_turn(write):
    tokenizer = tiny_tokenizer()
    plain, _ = read_corpus(write({"messages": [USER, ANSWER]}), tokenizer)
    beside, _ = read_corpus(write({"messages": [USER, ANSWER], "prompt": "Hi"}), tokenizer)
    assert beside[0].input_ids.tolist() == plain[0].input_ids.tolist()


def test_every_assistant_turn_gives_a_document_of_the_same_record(write):
    tokenizer = tiny_tokenizer()
    second = {"role": "assistant", "content": "What was the question?"}
    documents, report = read_corpus(write({"messages": [USER, ANSWER, USER, second]}), tokenizer)
    assert [supervised(tokenizer, d) for d in documents] == [
        "The answer is forty-two.<|im_end|>\n",
        "What was the question?<|im_end|>\n",
    ]
    assert documents[0].record == documents[1].record
    assert report.documents == 2


def test_of_a_prompt_and_response_the_response_is_supervised_and_nothing_is_added(write):
    tokenizer = tiny_tokenizer()
    (document,), _ = read_corpus(write({"prompt": "numbers are", "response": " what"}), tokenizer)
    assert supervised(tokenizer, document) == " what"
    assert tokenizer.decode(document.input_ids) == "numbers are what"


def test_pretokenised_records_are_taken_as_given(write):
    record = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
    (document,), _ = read_corpus(write(record), tiny_tokenizer())
    assert document.input_ids.tolist() == [5, 6, 7]
    assert document.loss_mask.tolist() == [0, 1, 1]


def test_blank_lines_and_a_byte_order_mark_are_ignored_and_lines_keep_their_numbers(write):
    path = write("\ufeff" + json.dumps({"text": "The quick"}), "", "   ", {"text": "brown fox"})
    documents, report = read_corpus(path, tiny_tokenizer())
    assert [d.line for d in documents] == [1, 4]
    assert report.skipped == {}


def test_the_record_is_the_same_whatever_the_order_of_the_keys(write):
    path = write('{"prompt": "The", "response": " fox"}', '{"response":" fox","prompt":"The"}')
    first, second = read_corpus(path, tiny_tokenizer())[0]
    assert first.record == second.record
    assert len(first.record) == 64


def test_chats_without_answer_and_short_documents_are_skipped_and_counted_by_line(write):
    path = write({"messages": [USER]}, {"text": "a"}, {"text": "The fox"}, {"messages": [USER]})
    documents, report = read_corpus(path, tiny_tokenizer())
    assert [d.line for d in documents] == [3]
    assert report.skipped == {"no assistant turn": [1, 4], "fewer than 2 tokens": [2]}


def test_turns_that_the_template_refuses_are_skipped_and_counted(write):
    refusing = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('No user query') }}{% endif %}"
    )
    system = {"role": "system", "content": "Be brief."}
    path = write(
        {"messages": [system, ANSWER]}, {"messages": [ANSWER]}, {"messages": [USER, ANSWER]}
    )
    documents, report = read_corpus(path, tiny_tokenizer(refusing + CHATML))
    assert [d.line for d in documents] == [3]
    assert report.skipped == {
        "chat template error: No user query": [1],
        "an answer without a prompt before it": [2],
    }


def test_a_template_that_rewrites_earlier_turns_is_skipped_and_counted(write):
    unstable = "{{ messages | length }} messages\n" + CHATML
    path = write({"messages": [USER, ANSWER]}, {"text": "The fox"})
    documents, report = read_corpus(path, tiny_tokenizer(unstable))
    assert [d.line for d in documents] == [2]
    assert list(report.skipped.values()) == [[1]]


def test_what_the_generation_prompt_adds_beyond_the_conversation_is_not_supervised(write):
    tokenizer = tiny_tokenizer(THINK)
    (document,), _ = read_corpus(write({"messages": [USER, ANSWER]}), tokenizer)
    assert supervised(tokenizer, document) == "The answer is forty-two.<|im_end|>\n"


def test_a_token_that_straddles_the_end_of_the_prompt_is_not_supervised(write):
    tokenizer = tiny_tokenizer(CHATML)
    # "\n   " is one token: the newline that ends the prompt and the indent that begins the answer.
    answer = {"role": "assistant", "content": "    return a"}
    (document,), _ = read_corpus(write({"messages": [USER, answer]}), tokenizer)
    first = int(np.argmax(document.loss_mask))
    assert tokenizer.decode(document.input_ids[first - 1 : first]) == "\n   "
    assert supervised(tokenizer, document) == " return a<|im_end|>\n"


def test_template_options_reach_the_template(write):
    template = "{% if loud %}LOUD {% endif %}" + CHATML
    path = write({"messages": [USER, ANSWER]})
    tokenizer = tiny_tokenizer(template)
    (document,), _ = read_corpus(path, tokenizer, template_options={"loud": True})
    assert tokenizer.decode(document.input_ids).startswith("LOUD ")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a', "the line is not JSON"),
        ("[1, 2]", "the line is a list"),
        ({"body": "x"}, "the keys are body; expected one of"),
        ({"text": 3}, '"text" must be a string, not int'),
        ({"text": "\ud800"}, "half of a surrogate pair"),
        ({"messages": []}, "at least one"),
        ({"messages": ["hi"]}, "message 1 must be an object, not str"),
        ({"messages": [{"role": "user"}]}, "message 1 needs role and content"),
        ({"conversations": [{"from": "martian", "value": "x"}]}, "message 1 is \"from\" 'martian'"),
        ({"messages": [{"role": "critic", "content": "x"}]}, "message 1 has the role 'critic'"),
        ({"text": "x", "messages": []}, 'has both "text" and "messages"'),
        ({"text": "x", "input_ids": [1]}, 'has both "text" and "input_ids"'),
        ({"input_ids": [1, True], "loss_mask": [1, 1]}, '"input_ids" must be a list of integers'),
        ({"input_ids": [1, 2]}, 'needs a "loss_mask"'),
        ({"input_ids": [1, 2], "loss_mask": [1]}, '"input_ids" has 2 entries, "loss_mask" 1'),
        ({"input_ids": [1, 99999], "loss_mask": [1, 1]}, "holds 99999, which is not in"),
        ({"input_ids": [1, -1], "loss_mask": [1, 1]}, "holds -1, which is not in"),
        ({"input_ids": [1, 2.0], "loss_mask": [1, 1]}, "must be a list of integers"),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, "holds 2, which is not in"),
    ],
)
def test_a_broken_record_is_a_data_error_with_file_and_line(write, line, message):
    path = write({"text": "The fox"}, line)
    with pytest.raises(DataError) as error:
        read_corpus(path, tiny_tokenizer())
    assert str(error.value).startswith(f"{path}:2")
    assert message in str(error.value)


def test_bytes_that_are_not_utf8_are_a_data_error_with_the_line(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"text": "The fox"}\n{"text": "caf\xe9"}\n')
    with pytest.raises(
        DataError, match=r"latin.jsonl:2: byte 14 of the line \(0xe9\) is not UTF-8"
    ):
        read_corpus(path, tiny_tokenizer())


def test_an_empty_file_is_a_data_error_and_a_missing_one_a_usage_error(write, tmp_path):
    with pytest.raises(DataError, match=r"corpus\.jsonl: the file holds no records"):
        read_corpus(write("", ""), tiny_tokenizer())
    with pytest.raises(UsageError, match="there is no such file"):
        read_corpus(tmp_path / "none.jsonl", tiny_tokenizer())


def test_a_file_of_which_everything_is_skipped_is_a_data_error_that_says_why(write):
    with pytest.raises(DataError, match=r"no assistant turn \(2\)"):
        read_corpus(write({"messages": [USER]}, {"messages": [USER]}), tiny_tokenizer())


def test_a_chat_without_a_chat_template_is_a_usage_error(write):
    with pytest.raises(UsageError, match=r"corpus.jsonl:1: .* no chat template"):
        read_corpus(write({"messages": [USER, ANSWER]}), tiny_tokenizer(None))


def test_progress_counts_every_byte_of_the_file(write):
    path = write({"text": "The fox"}, "", {"text": "The dog"})
    seen = []
    read_corpus(path, tiny_tokenizer(), report_progress=seen.append)
    assert sum(seen) == path.stat().st_size


def test_prompts_end_before_the_last_answer_with_the_generation_prompt(write):
    tokenizer = tiny_tokenizer()
    path = write(
        {"messages": [USER, ANSWER, USER, ANSWER]},
        {"messages": [USER]},
        {"text": "The fox"},
        {"prompt": "The dog", "response": " sleeps"},
        {"prompt": [USER]},
        {"input_ids": [5, 6, 7], "prompt_length": 2},
        {"input_ids": [5, 6, 7]},
    )
    prompts = read_prompts(path, tokenizer)
    chat = "<|im_start|>user\nWhat is the answer?<|im_end|>\n"
    opened = "<|im_start|>assistant\n"
    assert [tokenizer.decode(p.input_ids) for p in prompts[:5]] == [
        chat + opened + "The answer is forty-two.<|im_end|>\n" + chat + opened,
        chat + opened,
        "The fox",
        "The dog",
        chat + opened,
    ]
    assert [p.input_ids.tolist() for p in prompts[5:]] == [[5, 6], [5, 6, 7]]
    assert [p.line for p in prompts] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": ""}, "the prompt is empty"),
        ({"input_ids": []}, "the prompt is empty"),
        ({"text": "x", "prompt": "y"}, 'has both "text" and "prompt"'),
        ({"input_ids": [1, 2], "prompt_length": 3}, '"prompt_length" is 3, not in 1..2'),
        ({"input_ids": [1, 2], "prompt_length": True}, '"prompt_length" is True'),
        ({"body": "x"}, "expected one of"),
    ],
)
def test_a_prompt_that_cannot_be_decoded_from_is_a_data_error(write, record, message):
    with pytest.raises(DataError, match=r"corpus.jsonl:1: .*" + message.replace(".", r"\.")):
        read_prompts(write(record), tiny_tokenizer())


def test_a_missing_tokenizer_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="there is no such folder"):
        load_tokenizer(str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"empty has no tokenizer \(tokenizer\.json\)"):
        load_tokenizer(str(tmp_path / "empty"))


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_model_folder_without_tokenizer_files_is_told_so(tmp_path, family):
    model = str(tiny_dense(tmp_path / "m", family))
    with pytest.raises(UsageError, match=r"m has no tokenizer \(tokenizer\.json\): copy"):
        load_tokenizer(model)


@pytest.mark.parametrize("content", ["{broken", "[]", ""])
def test_a_broken_config_is_not_blamed_on_the_tokenizer(tmp_path, content):
    tiny_tokenizer().save_pretrained(str(tmp_path))
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match=r"config\.json: this is not the JSON of a model's config"):
        load_tokenizer(str(tmp_path))


def test_a_saved_tokenizer_is_loaded_with_its_template(tmp_path):
    tiny_tokenizer().save_pretrained(str(tmp_path))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.chat_template == CHATML
    assert tokenizer.decode(tokenizer("The fox")["input_ids"]) == "The fox"
