"""A file that is larger than what tokenising it may take of memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MIB = 2**20
LIMIT_MIB, FILE_MIB = 10, 64
"""Allowed above what a file of 8 MiB takes; size of the file, whose rows take 1.5 times as much."""
MEASURE = """
import resource, sys
from pathlib import Path
from megatrain.data import DataOptions, load_rows
from megatrain.data.cache import TokenCache
from tests.tokenizers_for_tests import byte_tokenizer

def peak_kib():
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    lines = Path("/proc/self/status").read_text().splitlines()
    return of_children, next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

tokenizer, cache, peaks = byte_tokenizer(), TokenCache("cache"), []
for file in sys.argv[2:]:
    rows = load_rows(Path(file), tokenizer, DataOptions(), cache=cache, processes=int(sys.argv[1]))
    peaks.append(peak_kib())
print(len(rows), rows.stats.tokens, *(after - before for before, after in zip(*peaks)))
"""


def write(path: Path, nbytes: int) -> int:
    """Tokenised records, which take a tenth of the time that text takes; their number."""
    line = json.dumps({"input_ids": [100 + i % 150 for i in range(200)]}) + "\n"
    count = nbytes // len(line)
    with path.open("w") as file:
        for start in range(0, count, 1000):
            file.write(line * min(1000, count - start))
    return count


@pytest.mark.process
@pytest.mark.parametrize("processes", [1, 2])
def test_memory_does_not_grow_with_the_file(processes: int, tmp_path: Path) -> None:
    write(tmp_path / "small.jsonl", 8 * MIB)
    count = write(tmp_path / "large.jsonl", FILE_MIB * MIB)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(processes), "small.jsonl", "large.jsonl"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
    )
    rows, tokens, of_children, of_parent = map(int, done.stdout.split())
    assert (rows, tokens) == (count, 200 * count)
    assert 8 * tokens > 10 * LIMIT_MIB * MIB  # in memory they would not fit
    assert of_parent < LIMIT_MIB * 1024 and of_children < LIMIT_MIB * 1024
