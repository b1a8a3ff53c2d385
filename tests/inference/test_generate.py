import pytest
import torch

from ds_engine.errors import ConfigError, DataError, NumericsError
from ds_engine.inference.generate import generate, left_padded, vocab_size
from ds_engine.inference.kv_cache import KVCache
from ds_engine.inference.sampling import GenerationSettings
from ds_engine.parallel.tensor_parallel import TensorParallel
from tests.inference.setups import (
    NEW,
    PROMPTS,
    build,
    configs,
    full_logits,
    greedy_by_recomputation,
    limit,
)

SINGLE = TensorParallel.single()
NAMES = [name for name in configs() if name != "one_layer_window"]


def run(name, prompts, model=None, **changes):
    settings = GenerationSettings(**{"max_new_tokens": NEW, **changes})
    return generate(
        model or build(name), prompts, settings, SINGLE, max_sequence_length=limit(name)
    )


@pytest.mark.parametrize("name", NAMES)
def test_cached_generation_equals_reading_everything_again(name):
    model = build(name)
    expected = [greedy_by_recomputation(model, prompt, NEW) for prompt in PROMPTS]
    assert len({tuple(row) for row in expected}) > 1
    assert max(len(set(row)) for row in expected) > 3, "too easy: the model repeats itself"
    for prompt, words in zip(PROMPTS, expected, strict=True):
        assert run(name, [prompt], model) == [words]
    assert run(name, PROMPTS, model) == expected


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_a_padded_batch_are_those_of_each_prompt_alone(name):
    model = build(name)
    generator = torch.Generator().manual_seed(0)
    later = torch.randint(61, (len(PROMPTS), NEW), generator=generator)
    cache = KVCache(len(PROMPTS), 2)
    inputs = left_padded(PROMPTS, torch.device("cpu"))
    with torch.no_grad():
        found = [model(inputs, None, cache)[:, -1]]
        for step in range(NEW):
            positions = inputs[1][:, -1:] + 1
            inputs = (later[:, step : step + 1], positions, torch.zeros_like(positions), inputs[3])
            found.append(model(inputs, None, cache)[:, -1])
    for row, prompt in enumerate(PROMPTS):
        alone = full_logits(model, prompt + later[row].tolist())[len(prompt) - 1 :]
        together = torch.stack([logits[row] for logits in found])
        assert torch.allclose(together, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["gpt", "window", "alibi"])
def test_padding_gives_finite_numbers_everywhere(name):
    cache = KVCache(len(PROMPTS), 1)
    with torch.no_grad():
        logits = build(name)(left_padded(PROMPTS, torch.device("cpu")), None, cache)
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("place", range(6))
def test_a_cached_word_sees_its_window_and_no_more(place):
    model = build("one_layer_window")  # 3 words: itself and the two before

    def last(prompt):
        tokens, positions, segments, ids = left_padded([prompt, [1]], torch.device("cpu"))
        cache = KVCache(2, 1)
        with torch.no_grad():
            for part in (slice(0, 5), slice(5, 6)):
                inputs = (tokens[:, part], positions[:, part], segments[:, part], ids)
                logits = model(inputs, None, cache)
        return logits[0, -1]

    changed = list(PROMPTS[0])
    changed[place] += 1 if place < 5 else -1
    same = torch.equal(last(changed), last(PROMPTS[0]))
    assert same == (place < 3)


def test_a_prompt_may_be_read_in_pieces():
    model = build("llama")
    tokens, positions, segments, ids = left_padded([PROMPTS[0]], torch.device("cpu"))
    cache = KVCache(1, 1)
    with torch.no_grad():
        parts = [
            model((tokens[:, a:b], positions[:, a:b], segments[:, a:b], ids), None, cache)
            for a, b in ((0, 2), (2, 3), (3, 6))
        ]
    assert torch.allclose(torch.cat(parts, 1)[0], full_logits(model, PROMPTS[0]), atol=1e-5)


def test_left_padding_counts_positions_from_the_text():
    tokens, positions, segments, ids = left_padded([[5, 6, 7], [9]], torch.device("cpu"))
    assert tokens.tolist() == [[5, 6, 7], [0, 0, 9]]
    assert positions.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert segments.tolist() == [[0, 0, 0], [-1, -1, 0]]
    assert ids.tolist() == [0, 1]


def test_bfloat16_weights_generate():
    model = build("llama", dtype=torch.bfloat16).to(torch.bfloat16)
    rows = run("llama", PROMPTS, model)
    assert [len(row) for row in rows] == [NEW] * len(PROMPTS)


def test_a_stop_word_ends_its_row_and_changes_no_other():
    model = build("gpt")
    free = run("gpt", PROMPTS, model)
    stop = free[0][2]
    expected = [row[: row.index(stop)] if stop in row else row for row in free]
    assert [len(row) for row in expected] != [NEW] * len(PROMPTS)
    assert run("gpt", PROMPTS, model, stop_ids=(stop,)) == expected


def test_all_rows_stopping_ends_the_work():
    model = build("gpt")
    first = greedy_by_recomputation(model, PROMPTS[0], 1)[0]
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    assert run("gpt", [PROMPTS[0]], model, stop_ids=(first, 60)) == [[]]
    assert len(calls) == 1


def test_the_first_call_reads_the_prompt_and_the_others_one_word():
    model = build("gpt")
    lengths = []
    model.register_forward_pre_hook(lambda _, args: lengths.append(args[0][0].shape[1]))
    run("gpt", PROMPTS, model)
    assert lengths == [6] + [1] * (NEW - 1)


def test_a_row_samples_the_same_with_and_without_neighbours():
    model = build("llama")
    chosen = {"temperature": 1.0, "top_p": 0.95, "top_k": 20, "seed": 5}
    together = run("llama", PROMPTS, model, **chosen)
    assert run("llama", PROMPTS[:1], model, **chosen) == together[:1]
    assert run("llama", PROMPTS[:3], model, **chosen) == together[:3]
    assert run("llama", PROMPTS, model, **chosen | {"seed": 6}) != together
    assert run("llama", PROMPTS, model) != together


def test_a_neighbour_that_stops_does_not_shift_a_random_stream():
    model = build("llama")
    free = run("llama", PROMPTS, model, temperature=1.0)
    stop = free[1][0]
    expected = [row[: row.index(stop)] if stop in row else row for row in free]
    assert run("llama", PROMPTS, model, temperature=1.0, stop_ids=(stop,)) == expected


def test_repetition_penalty_counts_the_prompt_and_not_the_padding():
    model = build("gpt")
    # So strong that no word comes twice, whatever the logits.
    rows = run("gpt", PROMPTS, model, repetition_penalty=1e6)
    for prompt, row in zip(PROMPTS, rows, strict=True):
        assert len(set(row)) == NEW
        assert not set(row) & set(prompt)
        assert run("gpt", [prompt], model, repetition_penalty=1e6) == [row]


def test_words_are_reported_as_they_come():
    seen = []
    model = build("gpt")
    free = run("gpt", PROMPTS[:2], model)
    settings = GenerationSettings(max_new_tokens=NEW, stop_ids=(free[0][3],))
    rows = generate(
        model,
        PROMPTS[:2],
        settings,
        SINGLE,
        max_sequence_length=16,
        on_token=lambda row, token: seen.append((row, token)),
    )
    for row in range(2):
        assert [token for number, token in seen if number == row] == rows[row]
    assert seen[:2] == [(0, free[0][0]), (1, free[1][0])]


def test_modes_and_gradients_are_left_as_they_were():
    model = build("gpt_dropout").train()
    model.stack[1].eval()  # a part that its owner has frozen
    modes = [module.training for module in model.modules()]
    expected = greedy_by_recomputation(build("gpt_dropout"), PROMPTS[0], NEW)
    assert run("gpt_dropout", [PROMPTS[0]], model) == [expected]  # no dropout
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(RuntimeError, match="from a callback"):
        generate(
            model,
            PROMPTS,
            GenerationSettings(max_new_tokens=2),
            SINGLE,
            max_sequence_length=16,
            on_token=_fail,
        )
    assert [module.training for module in model.modules()] == modes
    assert all(parameter.grad is None for parameter in model.parameters())


def _fail(row, token):
    raise RuntimeError("from a callback")


def test_no_prompt_is_no_work():
    assert run("gpt", []) == []


def test_the_whole_position_table_can_be_used():
    assert len(run("gpt", [[1] * 15], max_new_tokens=1)[0]) == 1
    with pytest.raises(ConfigError) as caught:
        run("gpt", [[1], [2] * 12], max_new_tokens=5)
    for fragment in ("prompt 1 has 12 tokens", "17", "max_sequence_length = 16", "at most 4"):
        assert fragment in str(caught.value)
    with pytest.raises(ConfigError, match="shorten the prompt") as caught:
        run("gpt", [[2] * 16], max_new_tokens=5)
    assert "at most" not in str(caught.value)


def test_positions_without_a_table_have_no_limit():
    assert len(run("llama", [[1] * 30], max_new_tokens=3)[0]) == 3


@pytest.mark.parametrize(
    ("prompt", "fragments"),
    [
        ([], ["prompt 1 is empty", "end-of-text"]),
        ([4, 61], ["token 1 of prompt 1 is 61", "vocab_size = 61", "tokenizer"]),
        ([-1], ["token 0 of prompt 1 is -1"]),
        ([1.5], ["whole numbers"]),
        ("text", ["prompt 1 is text", "tokenizer"]),
    ],
)
def test_prompts_that_cannot_be_continued(prompt, fragments):
    with pytest.raises(DataError) as caught:
        run("gpt", [[1], prompt])
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_tensors_are_prompts():
    rows = run("gpt", PROMPTS[:2])
    assert run("gpt", [torch.tensor(prompt) for prompt in PROMPTS[:2]]) == rows


def test_a_stop_word_outside_of_the_vocabulary_is_refused():
    with pytest.raises(ConfigError, match=r"stop_ids holds 61.*vocab_size = 61"):
        run("gpt", PROMPTS, stop_ids=(61,))


def test_words_that_the_tokenizer_lacks_do_not_come():
    model = build("gpt")
    limit = sorted(token for row in run("gpt", PROMPTS, model) for token in row)[4]
    rows = run("gpt", PROMPTS, model, vocab_limit=limit)
    assert [len(row) for row in rows] == [NEW] * len(PROMPTS)
    assert max(map(max, rows)) < limit


def test_sequence_parallelism_of_one_rank_cuts_nothing():
    tp = TensorParallel(None, 0, 1, sequence_parallel=True)
    settings = GenerationSettings(max_new_tokens=1)
    assert len(generate(build("gpt"), [[1]], settings, tp, max_sequence_length=16)[0]) == 1


def test_damaged_weights_are_an_error():
    model = build("gpt")
    with torch.no_grad():
        next(model.parameters())[7] = float("nan")
    with pytest.raises(NumericsError, match="checkpoint"):
        run("gpt", PROMPTS, model)
    assert not model.training


@pytest.mark.parametrize("name", ["gpt", "llama"])
def test_padded_words_are_no_words(name):
    assert vocab_size(build(name)) == 61
