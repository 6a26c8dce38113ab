"""Which tests run: GPU tests only with CUDA, and of the slow ones a seeded sample or all."""

import random

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--slow-sample",
        default="all",
        metavar="N|all",
        help="how many of the slow tests to run, drawn with --slow-seed (default: all)",
    )
    parser.addoption("--slow-seed", type=int, default=0, help="seed of the sample (default: 0)")


def pytest_configure(config: pytest.Config) -> None:
    # The models are tiny. With several threads a step mostly waits at torch's barriers as soon as
    # another process wants the cores: a test of 4 s on a quiet machine takes minutes then.
    if not torch.cuda.is_available():
        torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)  # after -m has taken away what it does not want
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skip_gpu = pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none here")
    cuda = torch.cuda.is_available()
    idle = [item for item in items if "gpu" in item.keywords and not cuda]
    for item in idle:
        item.add_marker(skip_gpu)
    _sample_slow(config, [item for item in items if item not in idle])


def _sample_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--slow-sample")
    if wanted == "all":
        return
    slow = sorted((i for i in items if "slow" in i.keywords), key=lambda i: i.nodeid)
    kept = set(
        random.Random(config.getoption("--slow-seed")).sample(slow, min(int(wanted), len(slow)))
    )
    skip = pytest.mark.skip(reason=f"slow: not among the {wanted} drawn; `make test-all` runs it")
    for item in slow:
        if item not in kept:
            item.add_marker(skip)
