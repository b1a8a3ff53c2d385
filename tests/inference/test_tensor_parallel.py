"""One process and every tensor-parallel degree write the same text."""

from __future__ import annotations

import pytest

from tests.inference.setups import PROMPTS, build, limit
from tests.worlds import run_world

WORDS = 6
SETTINGS = (
    {},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 4},
)
# Two and one key/value heads are fewer than four ranks, one is fewer than two.
CASES = {2: ("gpt", "alibi", "multi_query"), 4: ("gpt", "llama", "multi_query")}


def _handle(size, sequence=False):
    from ds_engine.parallel.context import ParallelContext
    from ds_engine.parallel.dims import ParallelDims

    context = ParallelContext.create(ParallelDims(size, tensor=size))
    return context.tensor_parallel(sequence_parallel=sequence)


def _write(tp, names):
    from ds_engine.inference.generate import generate
    from ds_engine.inference.sampling import GenerationSettings

    rows = []
    for name in names:
        model = build(name, tp)
        for changes in SETTINGS:
            settings = GenerationSettings(max_new_tokens=WORDS, **changes)
            rows.append(generate(model, PROMPTS, settings, tp, max_sequence_length=limit(name)))
    return rows


def _body(rank, size, names):
    return _write(_handle(size), names)


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_write_what_one_process_writes(size):
    from ds_engine.parallel.tensor_parallel import TensorParallel

    alone = _write(TensorParallel.single(), CASES[size])
    for rows in run_world(size, _body, size, CASES[size]):
        assert rows == alone


def _disagreeing_body(rank, size):
    """Each rank sees logits of its own, as if its kernels had rounded every tie another way."""
    import torch

    from ds_engine.inference.generate import generate
    from ds_engine.inference.sampling import GenerationSettings

    tp = _handle(size)
    model = build("gpt", tp)
    generator = torch.Generator().manual_seed(rank)
    model.register_forward_hook(
        lambda _, args, logits: torch.randn(logits.shape, generator=generator)
    )
    settings = GenerationSettings(max_new_tokens=WORDS, stop_ids=(3, 17, 40, 41, 42))
    return generate(model, PROMPTS, settings, tp, max_sequence_length=16)


def test_ranks_that_would_choose_differently_follow_rank_0():
    rows = run_world(2, _disagreeing_body, 2)
    assert rows[0] == rows[1]
    assert any(rows[0])


def _errors_body(rank, size):
    from ds_engine.errors import DsEngineError
    from ds_engine.inference.generate import generate
    from ds_engine.inference.sampling import GenerationSettings

    tp = _handle(size)
    model = build("gpt", tp)
    settings = GenerationSettings(max_new_tokens=2)
    attempts = (
        ([[1, 2 + rank]], settings, tp),
        ([[1], [] if rank else [2]], settings, tp),
        ([[1, 2]], GenerationSettings(max_new_tokens=2 + rank), tp),
        ([[]], settings, tp),
        ([[1, 2]], settings, _handle(size, sequence=True)),
        ([[1, 2]], settings, tp),
    )
    found = []
    for prompts, chosen, handle in attempts:
        try:
            found.append(generate(model, prompts, chosen, handle, max_sequence_length=16))
        except DsEngineError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


def test_wrong_arguments_are_the_same_error_on_all_ranks_and_never_a_hang():
    first, second = run_world(2, _errors_body, 2)
    assert first == second
    different, one_empty, lengths, empty, sequence, good = first
    for text in (different, one_empty, lengths):
        assert text.startswith("LaunchError: the ranks of a tensor-parallel group")
    assert empty.startswith("DataError: prompt 0 is empty")
    assert sequence.startswith("ConfigError: parallel.sequence = true cannot generate")
    assert len(good[0]) == 2
