"""How long the sample index of 10 million documents takes to build, and a sample to look up.

    python tests/benchmarks/sample_index.py --json figures.json

Reference: building the index of 10 million documents with the C++ helpers of Megatron-LM takes
about 1.6 CPU-seconds (a quoted figure; it is not run here).
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from ds_engine.data.causal_lm import CausalLM
from ds_engine.data.indexed import IndexedDataset
from ds_engine.data.indexed_writer import IndexedWriter
from ds_engine.data.samples import ShuffledSamples


def write_documents(prefix: Path, documents: int, mean_length: int) -> None:
    """Write random documents in blocks; lengths are exponential, some empty."""
    random = np.random.default_rng(0)
    with IndexedWriter(prefix, vocab_size=50_257) as writer:
        for begin in range(0, documents, 100_000):
            count = min(100_000, documents - begin)
            lengths = random.exponential(mean_length, count).astype(np.int64)
            tokens = random.integers(0, 50_257, int(lengths.sum()), dtype=np.uint16)
            writer.add_documents(tokens, lengths.tolist())


def measure(
    documents: int, mean_length: int, sequence_length: int, lookups: int
) -> dict[str, object]:
    """Return the figures, in CPU-seconds of this process and microseconds a sample."""
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "data"
        write_documents(prefix, documents, mean_length)
        began = time.process_time()
        data = IndexedDataset(prefix)
        opened = time.process_time()
        samples = ShuffledSamples(data, sequence_length=sequence_length, seed=1)
        _ = samples[0]
        built = time.process_time()
        objective = CausalLM(sequence_length)
        numbers = range(1, lookups + 1)
        per_sample = []
        per_row = []
        for number in numbers:
            begin = time.perf_counter()
            sample = samples[number]
            middle = time.perf_counter()
            objective(sample)
            per_sample.append(middle - begin)
            per_row.append(time.perf_counter() - middle)
    return {
        "documents": documents,
        "tokens": data.num_tokens,
        "sequence_length": sequence_length,
        "open_and_check_cpu_seconds": round(opened - began, 3),
        "build_index_cpu_seconds": round(built - opened, 3),
        "reference_cpu_seconds": 1.6,
        "sample_microseconds_median": round(1e6 * float(np.median(per_sample)), 1),
        "objective_microseconds_median": round(1e6 * float(np.median(per_row)), 1),
    }


def main() -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=10_000_000)
    parser.add_argument("--mean-length", type=int, default=60)
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--lookups", type=int, default=5_000)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    given = parser.parse_args()
    figures = measure(given.documents, given.mean_length, given.sequence_length, given.lookups)
    text = json.dumps(figures, indent=2)
    print(text)
    if given.json:
        Path(given.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
