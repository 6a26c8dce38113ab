"""Devices and precisions: what the names mean, and what is refused where there is no CUDA."""

import pytest
import torch

from dflash_cache.devices import DTYPES, choose_device, choose_dtype
from dflash_cache.errors import UsageError

CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture
def no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def two_gpus(monkeypatch):
    """torch as it is where it sees two GPUs; the devices that were made the current one."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return made


@pytest.mark.usefixtures("no_cuda")
def test_without_cuda_auto_is_the_cpu():
    assert choose_device("auto") == choose_device("cpu") == CPU


@pytest.mark.usefixtures("no_cuda")
@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:1"])
def test_cuda_without_cuda_says_to_give_cpu(name, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(UsageError, match=r"device is cuda:\d, but torch sees no CUDA GPU here"):
        choose_device(name)


@pytest.mark.parametrize("name", ["tpu", "", "meta", "mps", "cuda:x", "cuda:-1", "cpu,cuda", "CPU"])
def test_an_unknown_name_is_refused_and_the_known_ones_told(name):
    with pytest.raises(UsageError) as caught:
        choose_device(name)
    assert str(caught.value) == f"device {name!r} is not known; it is auto, cpu, cuda or cuda:N"


@pytest.mark.parametrize(
    ("name", "local_rank", "index"),
    [("auto", None, 0), ("cuda", None, 0), ("cuda", "1", 1), ("auto", "1", 1), ("cuda:1", "0", 1)],
)
def test_with_cuda_each_process_has_its_own_gpu_as_the_current_one(
    two_gpus, monkeypatch, name, local_rank, index
):
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    device = choose_device(name)
    assert device == torch.device("cuda", index)
    assert two_gpus == [device]


def test_a_gpu_that_is_not_there_is_refused_with_their_number(two_gpus):
    with pytest.raises(UsageError, match="device is cuda:2, but there are 2 GPUs"):
        choose_device("cuda:2")
    assert two_gpus == []


def test_with_cuda_the_cpu_can_still_be_asked_for(two_gpus):
    assert choose_device("cpu") == CPU
    assert two_gpus == []


def test_auto_precision_is_float32_on_the_cpu_and_bfloat16_on_cuda():
    assert choose_dtype("auto", CPU) is torch.float32
    assert choose_dtype("auto", CUDA) is torch.bfloat16


@pytest.mark.parametrize("name", list(DTYPES))
def test_a_named_precision_is_that_one_on_every_device(name):
    found = {choose_dtype(name, device) for device in (CPU, CUDA)}
    assert found == {getattr(torch, name)}


@pytest.mark.parametrize("name", ["fp8", "", "torch.float32", "float64"])
def test_an_unknown_precision_is_refused_and_the_known_ones_told(name):
    with pytest.raises(UsageError) as caught:
        choose_dtype(name, CPU)
    known = "auto, float32, bfloat16, float16"
    assert str(caught.value) == f"dtype {name!r} is not known; it is {known}"
