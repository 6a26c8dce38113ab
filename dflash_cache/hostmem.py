"""How much host memory this process may still take."""

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
# Of a container: its folder, the files of the limit and the use; cgroup v2, then v1.
CGROUPS = (
    (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
# Pages of files, given back when memory is wanted: reading a checkpoint fills them.
RECLAIMABLE = ("inactive_file", "active_file")


def free_host_memory() -> int:
    """Bytes that are free or can be freed at once, within the container's limit if there is one."""
    return min([_available(), *(left for group in CGROUPS for left in cgroup_left(*group))])


def _available() -> int:
    if MEMINFO.is_file():
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def cgroup_left(folder: Path, limit: str, use: str) -> list[int]:
    """What a control group leaves, its file cache counted as free; empty if it limits nothing."""
    if not (folder / limit).is_file() or not (folder / use).is_file():
        return []
    text = (folder / limit).read_text().strip()
    if not text.isdigit():  # "max"
        return []
    used = int((folder / use).read_text()) - _file_cache(folder / "memory.stat")
    return [max(int(text) - used, 0)]


def _file_cache(stat: Path) -> int:
    if not stat.is_file():
        return 0
    pairs = (line.split() for line in stat.read_text().splitlines())
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in RECLAIMABLE)


def processes_here() -> int:
    """Workers of this run that share this host, as the launcher tells."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
