"""The `dflash` command: parse, call, print. What the work is stands in the two packages."""

import dataclasses
import errno
import importlib.resources
import json
import os
import shlex
import shutil
import sys
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from dflash_cache.errors import DataError, UsageError
from dflash_cache.options import build, read_yaml

# Spinning OpenMP threads make a busy machine of few cores ten times slower (docs/log.md). Read when
# torch is first imported, which the commands do later, so that `--help` answers at once.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

BROKEN_PIPE = 141  # as a shell has it: 128 + SIGPIPE
INTERRUPTED = 130  # as a shell has it: 128 + SIGINT
PATH = click.Path(path_type=Path)
EXISTING = click.Path(exists=True, path_type=Path)


def _end_quietly() -> None:
    """Nobody reads our output any more: that is no failure, but no success either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(BROKEN_PIPE)


class Output(Console):
    """Writes to the terminal; a closed pipe ends the command as it ends any other one."""

    def on_broken_pipe(self) -> None:
        _end_quietly()


console = Output(highlight=False, soft_wrap=True)


class Sentences(click.Group):
    """Turns the errors that a user can mend into one sentence and an exit code: 2 usage, 1 data."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            click.echo("interrupted: what was finished is kept", err=True)
            ctx.exit(getattr(error, "exit_code", INTERRUPTED))
        except UsageError as error:
            raise click.UsageError(str(error)) from error
        except DataError as error:
            raise click.ClickException(str(error)) from error
        except RuntimeError as error:
            # A broken promise under --strict, or CUDA out of memory; any other one is a bug.
            if type(error).__name__ not in ("SteadyError", "OutOfMemoryError"):
                raise
            raise click.ClickException(str(error)) from error
        except OSError as error:
            if error.errno == errno.EPIPE:  # `dflash ... | head`: what read is gone
                _end_quietly()
            place = f": {error.filename}" if error.filename else ""
            raise click.ClickException(f"{error.strerror or error}{place}") from error


@click.group(cls=Sentences, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dflash-train", prog_name="dflash")
def main() -> None:
    """Train a DFlash drafter for your own target model.

    `dflash extract` runs the target once and caches its hidden states; `dflash train` trains the
    drafter from that cache alone; `dflash eval` measures what it drafts. `dflash demo` shows all of
    it on a small model that ships with the tool.
    """


def config_options(config: type, *, renamed: dict[str, str] | None = None) -> Callable:
    """A click option for every field of a config dataclass, and `--config FILE.yaml`."""
    hints = typing.get_type_hints(config)

    def decorate(command: Callable) -> Callable:
        for field in reversed(dataclasses.fields(config)):
            command = _option(field, hints[field.name])(command)
        text = "YAML file with any of these options as keys; the command line wins."
        return click.option("--config", "config_file", type=PATH, help=text)(command)

    return decorate


def _option(field: dataclasses.Field, hint: Any) -> Callable:
    kinds = [t for t in typing.get_args(hint) or (hint,) if t is not type(None)]
    name = field.name.replace("_", "-")
    text = field.metadata["help"]
    notes = [field.metadata.get("unit", "")]
    if field.default is dataclasses.MISSING:
        notes.append("required")
    elif field.default not in (None, ""):
        notes.append(f"default: {field.default}")
    text += f"  [{', '.join(n for n in notes if n)}]" if any(notes) else ""
    if kinds[0] is bool:
        return click.option(f"--{name}/--no-{name}", field.name, default=None, help=text)
    types = {int: click.INT, float: click.FLOAT, Path: PATH}
    return click.option(f"--{name}", field.name, type=types.get(kinds[0], click.STRING), help=text)


def _config(config: type, config_file: Path | None, given: dict[str, Any]) -> Any:
    content = read_yaml(config_file) if config_file else {}
    source = str(config_file) if config_file else "command line"
    return build(config, content, source=source, overrides=given)


def _say(line: str) -> None:
    click.echo(line)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))


def _extract_options(command: Callable) -> Callable:
    from dflash_cache.extract_config import ExtractConfig

    return config_options(ExtractConfig)(command)


def _train_options(command: Callable) -> Callable:
    from dflash_train.config import TrainConfig

    return config_options(TrainConfig)(command)


@main.command(short_help="Run the target once and cache its hidden states.")
@_extract_options
@click.option(
    "--dry-run", is_flag=True, help="Say what it takes of disk and time; write nothing at all."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON at the end.")
def extract(config_file: Path | None, dry_run: bool, as_json: bool, **given: Any) -> None:
    """Run the target once over a JSONL and write its hidden states to a zarr cache.

    Each line of --data is {"text": ...}, {"messages": [{"role", "content"}]}, {"conversations":
    [{"from", "value"}]}, {"prompt", "response"} or {"input_ids", "loss_mask"}. A tap i is the
    output of decoder layer i (0-based), which transformers calls hidden_states[i+1]. A run that was
    stopped continues where it was: finished shards are kept. Any number of processes may work on
    one --out at once, started by torchrun, by SLURM or by hand with --rank and --world.

    Exits with 130 after Ctrl-C and with 143 after SIGTERM.
    """
    from dflash_cache import extract as job
    from dflash_cache.extract_config import ExtractConfig

    config = _config(ExtractConfig, config_file, given)
    say = (lambda line: click.echo(line, err=True)) if as_json else _say
    if dry_run:
        _show(job.dry_run(config, report=say), as_json)
        return
    summary = job.extract(config, report=say)
    _show(summary, as_json)
    if summary.exit_code:
        sys.exit(summary.exit_code)


def _show(result: Any, as_json: bool) -> None:
    """A command's result, if it has any, as JSON or as lines for a person."""
    if result is not None and as_json:
        _print_json(result.to_dict())
    elif result is not None:
        console.print(result.render(), markup=False)


@main.command("inspect-shard", short_help="Show what is in a shard or in a cache.")
@click.argument("path", type=PATH)
@click.option(
    "--tokens",
    default=64,
    show_default=True,
    type=click.IntRange(0),
    help="How much text to decode and show.  [tokens]",
)
@click.option(
    "--plot",
    "picture",
    type=PATH,
    help="PNG to draw: absmax and norm per tap and position, histograms of length and fill.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def inspect_shard_command(path: Path, tokens: int, picture: Path | None, as_json: bool) -> None:
    """Show what is in a shard: shapes, statistics, checksums, text; or summarise a whole cache.

    Of a shard everything is read and recomputed. The summary of a cache rests on its metadata:
    `dflash verify` checks the data. --plot reads the states of at most 64 rows. Exits with 1 if
    there is damage.
    """
    from dflash_cache.inspector import inspect_path, show

    if picture is not None:
        from dflash_cache.plot import check_plot, plot

        check_plot(picture)
    report = inspect_path(path, tokens=tokens)
    if as_json:
        _print_json(report.to_dict())
    else:
        show(report, console)
    if picture is not None:
        plot(path, picture)
        click.echo(f"drawn: {picture}", err=as_json)
    if report.problems:
        sys.exit(1)


@main.command(short_help="Store a cache in another encoding.")
@click.argument("source", type=PATH)
@click.argument("destination", type=PATH)
@click.option(
    "--encoding",
    required=True,
    type=click.Choice(["bf16", "int8", "fp8", "bf16-lossless"]),
    help="How to store the states.",
)
@click.option("--device", default="auto", show_default=True, help="cuda, cpu or auto.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON at the end.")
def convert(source: Path, destination: Path, encoding: str, device: str, as_json: bool) -> None:
    """Store the cache SOURCE in another encoding, as DESTINATION.

    bf16 and bf16-lossless hold every bit; int8 and fp8 take half the bytes of bf16, and the error
    is printed. Rows are verified on both sides; a conversion that was stopped continues.
    """
    from dflash_cache.convert import convert as run

    say = (lambda line: click.echo(line, err=True)) if as_json else _say
    summary = run(source, destination, encoding, device=device, report=say)
    if as_json:
        _print_json(summary.to_dict())
    else:
        _say(summary.render())


@main.command("verify", short_help="Check every byte of a cache.")
@click.argument("cache", metavar="DIR", type=PATH)
@click.option(
    "--recompute",
    "count",
    type=click.IntRange(1),
    help="Run N random documents through --model again and compare the states.  [documents]",
)
@click.option("--model", help="The cache's target, for --recompute: a folder or a hub id.")
@click.option("--seed", default=0, show_default=True, help="Draws the documents to recompute.")
@click.option("--device", default="auto", show_default=True, help="cuda, cpu or auto.")
@click.option(
    "--dtype",
    default="auto",
    show_default=True,
    help="float32, bfloat16, float16; auto: the precision that the cache was extracted with.",
)
@click.option("--revision", help="Revision of a hub id.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that the model's folder brings.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def verify_command(cache: Path, as_json: bool, **asked: Any) -> None:
    """Check a whole cache: checksums, plan, manifest and states; with --recompute the target too.

    Reads every byte of every shard that is there, at the speed of the disk. An unfinished cache is
    no damage, but it is told. Each problem is one line that names the file and the row. Exits with
    1 if anything is damaged.
    """
    from dflash_cache.verify import Recompute, verify

    say = (lambda line: click.echo(line, err=True)) if as_json else _say
    report = verify(cache, report=say, recompute=Recompute(**asked))
    if as_json:
        _print_json(report.to_dict())
    else:
        _say(report.render())
    if report.problems:
        sys.exit(1)


@main.command("doctor", short_help="Show what this machine has and what is missing.")
@click.option("--model", help="A target (folder or hub id): show what would run its layers.")
@click.option("--revision", help="Revision of a hub id.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that the model's folder brings.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def doctor_command(model: str | None, as_json: bool, **loading: Any) -> None:
    """Show what this machine has, what is missing, and the command that installs it.

    With --model also which kernels would compute each class of its layers, on CUDA and on the CPU;
    only the model's config is read. Exits with 1 if something that an extraction needs is missing:
    a package, fused kernels where there is a GPU, or support for the model.
    """
    from dflash_cache.doctor import examine, render

    report = examine(model, **loading)
    if as_json:
        _print_json(report.to_dict())
    else:
        render(report, console)
    if not report.ok:
        sys.exit(1)


@main.command()
@_train_options
@click.option(
    "--dry-run", is_flag=True, help="Say what it takes of memory, disk and time; write nothing."
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON at the end.")
def train(config_file: Path | None, dry_run: bool, as_json: bool, **given: Any) -> None:
    """Train a drafter from a cache; the target is never loaded.

    Writes checkpoints in the layout that z-lab's drafters have (model.safetensors, config.json),
    the state to resume from, and metrics.jsonl. SIGTERM and Ctrl-C save first; --resume goes on
    from there, bit for bit on as many ranks, with the same rows in each step on any other number.

    On N GPUs of a machine: `torchrun --nproc-per-node N --no-python dflash train ...`; then
    --accumulation, which counts over all ranks, is a multiple of N.
    """
    from dflash_train.config import TrainConfig
    from dflash_train.dryrun import dry_run as look
    from dflash_train.trainer import train as run

    config = _config(TrainConfig, config_file, given)
    say = (lambda line: click.echo(line, err=True)) if as_json else _say
    if dry_run:
        _show(look(config, report=say), as_json)
        return
    summary = run(config, report=say)
    if as_json and summary.rank == 0:
        _print_json(summary.to_dict())
    if summary.exit_code:
        sys.exit(summary.exit_code)


@main.command("eval", short_help="Measure a drafter by exact speculative decoding.")
@click.option("--model", required=True, help="The target: a folder or a hub id.")
@click.option("--drafter", required=True, type=EXISTING, help="A drafter's folder.")
@click.option("--data", required=True, type=EXISTING, help="JSONL of prompts, text or chat.")
@click.option(
    "--max-new-tokens",
    default=128,
    show_default=True,
    type=click.IntRange(2),
    help="Where an answer ends if no stop token came before.  [tokens]",
)
@click.option("--prompts", type=click.IntRange(1), help="Use the first N.  [default: all]")
@click.option("--device", default="auto", show_default=True, help="cuda, cpu or auto.")
@click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16 or auto.")
@click.option("--revision", help="Revision of a hub id.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that the model's folder brings.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def eval_command(
    model: str,
    drafter: Path,
    data: Path,
    max_new_tokens: int,
    prompts: int | None,
    as_json: bool,
    **loading: Any,
) -> None:
    """Measure a drafter: exact greedy speculative decoding against plain decoding.

    tau is the acceptance length: the tokens that one pass of the target emits, bonus included. A
    prompt is {"text"} (continued), a chat ({"messages"}: its last answer is written anew),
    {"prompt"} or {"input_ids"}.
    """
    from dflash_cache.progress import progress
    from dflash_train.evaluate import evaluate
    from dflash_train.speculate import load_speculator

    code, revision = loading["trust_remote_code"], loading["revision"]
    asked = _prompts(model, data, prompts, trust_remote_code=code, revision=revision)
    speculator = load_speculator(model, drafter, **loading)
    click.echo(f"target: {speculator.describe()}", err=True)
    with progress(len(asked) * max_new_tokens, "eval", "tokens") as bar:
        report = evaluate(speculator, asked, max_new_tokens, advance=bar.advance)
    if as_json:
        _print_json(report.to_dict())
    else:
        _say(report.render())


def _prompts(
    model: str, data: Path, count: int | None, **loading: Any
) -> list[tuple[int, list[int]]]:
    """`(line, token ids)` of the first `count` prompts in a file."""
    from dflash_cache.corpus import load_tokenizer, read_prompts
    from dflash_cache.identity import check_model_path

    check_model_path(model)
    tokenizer = load_tokenizer(model, **loading)
    return [(p.line, p.input_ids.tolist()) for p in read_prompts(data, tokenizer)][:count]


@main.command(short_help="Run the whole job on a small model that ships with the tool.")
@click.option("--out", default=Path("demo-run"), show_default=True, type=PATH, help="Run's folder.")
@click.option("--device", default="auto", show_default=True, help="cuda, cpu or auto.")
@click.option("--steps", type=click.IntRange(1), help="Training steps.  [default: by device]")
@click.option(
    "--prompts", default=20, show_default=True, type=click.IntRange(2), help="Prompts to decode."
)
@click.option("--overwrite", is_flag=True, help="Remove an earlier run in --out first.")
@click.pass_context
def demo(
    ctx: click.Context, out: Path, device: str, steps: int | None, prompts: int, overwrite: bool
) -> None:
    """The whole job on a small trained hybrid target that ships with the tool.

    Extracts a corpus, inspects a shard, trains a drafter, and decodes held-out prompts with three
    drafters: an untrained one, the one trained here, and the one that ships.
    """
    files = _demo_files()
    device = _device(device)
    _fresh(out, overwrite)
    cache, run = out / "hs", out / "run"
    model = str(files / "target")
    recipe = str(files / f"train-{device.split(':')[0]}.yaml")
    _step(ctx, "extract", "--config", files / "extract.yaml", "--model", model, "--out", cache,
          "--data", files / "corpus.jsonl", "--device", device)  # fmt: skip
    _step(ctx, "inspect-shard", cache / "shards" / "000000.zarr")
    more = ("--steps", steps) if steps else ()
    _step(ctx, "train", "--config", recipe, "--cache", cache, "--out", run, "--device", device,
          *more)  # fmt: skip
    console.print(_demo_table(files, out, device, prompts))


def _demo_files() -> Path:
    """`configs/demo` of a source tree, or its copy in an installed wheel."""
    beside = Path(__file__).parent / "configs" / "demo"
    if beside.is_dir():
        return beside
    return Path(str(importlib.resources.files("dflash_configs"))) / "demo"


def _fresh(out: Path, overwrite: bool) -> None:
    """An empty folder `out`; an earlier demo's is removed if asked, anything else is left alone."""
    if out.exists() and not overwrite:
        raise UsageError(f"{out} exists: give another --out, or --overwrite to remove it")
    if out.exists():
        foreign = sorted({p.name for p in out.iterdir()} - {"hs", "run", "eval.json"})
        if foreign:
            raise UsageError(f"{out} holds {foreign[0]}, which no demo made: give another --out")
        shutil.rmtree(out)
    out.mkdir(parents=True)


def _device(name: str) -> str:
    from dflash_cache.devices import choose_device

    place = choose_device(name)  # refuses a device that is not there
    return place.type if name == "auto" else name


def _step(ctx: click.Context, name: str, *arguments: object) -> None:
    """Show a command as a person would type it, and run it."""
    words = [str(argument) for argument in arguments]
    console.rule(f"[bold]dflash {name}", align="left")
    console.print(f"$ dflash {name} {shlex.join(words)}", style="dim", markup=False)
    command = main.commands[name]
    with command.make_context(name, words, parent=ctx) as inner:
        command.invoke(inner)


def _demo_table(files: Path, out: Path, device: str, count: int) -> Table:
    """Decode held-out prompts with three drafters; the target alone decodes them once."""
    from dflash_train.speculate import load_speculator, untrained_copy

    console.rule("[bold]dflash eval, three drafters", align="left")
    model, data = str(files / "target"), files / "prompts.jsonl"
    console.print(f"$ dflash eval --model {model} --drafter DRAFTER --data {data}", style="dim")
    trained = load_speculator(model, out / "run" / "drafter", device=device, dtype="float32")
    console.print(f"target: {trained.describe()}", markup=False)
    drafters = {
        "untrained": trained.with_drafter(untrained_copy(trained.drafter)),
        "trained here": trained,
        "shipped": trained.with_drafter_from(files / "drafter"),
    }
    reports = _decode_all(drafters, _prompts(model, data, count), max_new_tokens=64)
    (out / "eval.json").write_text(
        json.dumps({name: r.to_dict() for name, r in reports.items()}, indent=2) + "\n"
    )
    return _table_of(reports)


def _decode_all(drafters: dict[str, Any], prompts: list, max_new_tokens: int) -> dict[str, Any]:
    from dflash_cache.progress import progress
    from dflash_train.evaluate import evaluate

    reports: dict[str, Any] = {}
    plain = None
    with progress(len(drafters) * len(prompts) * max_new_tokens, "eval", "tokens") as bar:
        for name, speculator in drafters.items():
            reports[name] = evaluate(speculator, prompts, max_new_tokens, plain, bar.advance)
            plain = [r.plain for r in reports[name].results]
    return reports


def _table_of(reports: dict[str, Any]) -> Table:
    """One line a drafter; tau and its gain with their 95 % intervals over the prompts."""
    from dflash_train.evaluate import paired_gain

    title = "held-out prompts, greedy, against plain decoding"
    table = Table(title=title, box=None, padding=(0, 2, 0, 0), title_justify="left")
    table.add_column("drafter", no_wrap=True)
    for column in ("tau (95 %)", "gain (95 %)", "identical\noutputs", "speed"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, report in reports.items():
        low, high = report.tau_interval()
        mean, least, most = paired_gain(report, reports["untrained"])
        gain = "" if name == "untrained" else f"{mean:+.2f} ({least:+.2f} to {most:+.2f})"
        speculative, plain = report.speeds()
        tau = f"{report.tau:.2f} ({low:.2f} to {high:.2f})"
        same = f"{report.identical}/{len(report.results)}"
        table.add_row(name, tau, gain, same, f"{speculative / plain:.2f}x")
    return table


if __name__ == "__main__":
    main()
