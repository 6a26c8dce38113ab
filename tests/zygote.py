"""The command line in processes that start at once: a server that has imported all of it forks.

Each child is a process of its own, with its own exit code, to be killed or signalled like any
other; only the seconds of importing are shared.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent


class Child:
    """A running command. `log` gets its stdout and stderr."""

    def __init__(self, zygote: "Zygote", pid: int, log: Path):
        self.zygote, self.pid, self.log = zygote, pid, log
        self.code: int | None = None

    def signal(self, number: int) -> None:
        """A signal to a process that has ended, but was not waited for, does nothing."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit code; minus the signal if one ended it."""
        if self.code is None:
            self.code = self.zygote.ask({"wait": self.pid})
        return self.code

    def text(self) -> str:
        return self.log.read_text()


class Zygote:
    """`start(words)` runs `dflash words...` in a forked process; a context manager."""

    def __init__(self) -> None:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.zygote"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.count = 0
        self.ask({})

    def __enter__(self) -> "Zygote":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()

    def ask(self, message: dict[str, Any]) -> Any:
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, words: list[object], folder: Path, **environment: object) -> Child:
        """Run a command; its log lies in `folder`."""
        self.count += 1
        log = folder / f"log-{self.count}"
        pid = self.ask(
            {
                "words": [str(word) for word in words],
                "log": str(log),
                "environment": {name: str(value) for name, value in environment.items()},
            }
        )
        return Child(self, pid, log)

    def run(self, words: list[object], folder: Path, **environment: object) -> tuple[int, str]:
        """(exit code, what it printed)"""
        child = self.start(words, folder, **environment)
        return child.wait(), child.text()


def until(condition: Any, seconds: float = 60.0) -> None:
    """Wait for `condition()`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def serve() -> None:
    """Read one JSON request a line, answer each with one line."""
    preload()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


def preload() -> None:
    """Import what an extraction needs; nothing here may start a thread."""
    import torch
    import zarr
    from transformers.models.llama import modeling_llama
    from transformers.models.qwen3_5 import modeling_qwen3_5

    import cli
    import dflash_cache.extract

    torch.set_num_threads(1)
    assert all((zarr, modeling_llama, modeling_qwen3_5, cli, dflash_cache.extract))


def answer(message: dict[str, Any]) -> int:
    if "wait" in message:
        return os.waitstatus_to_exitcode(os.waitpid(message["wait"], 0)[1])
    if not message:
        return os.getpid()
    pid = os.fork()
    if pid == 0:
        child(message)
    return pid


def child(message: dict[str, Any]) -> None:
    import cli

    with open(message["log"], "w") as log:
        for number in (1, 2):
            os.dup2(log.fileno(), number)
    os.environ.update(message["environment"])
    code: Any = 0
    try:
        cli.main(message["words"], prog_name="dflash")
    except SystemExit as end:
        code = end.code
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    serve()
