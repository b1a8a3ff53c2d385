"""Weight tables: how a Hugging Face state dict corresponds to our canonical parameters.

A family is a list of entries, each a pattern of our name, the names on the other side and a
lossless rearrangement in both directions. Everything else (layers, missing and unexpected names,
tied heads, vocabulary padding, tensor-parallel shards) is done here once for all families.

Entries do not depend on each other, so a converter may also walk over ``HFFamily.table`` and hold
one parameter at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ds_engine.errors import CheckpointError
from ds_engine.parallel.parameter import spec_of

_SHOWN = 8


@dataclass(frozen=True)
class Entry:
    """One of our parameters and where it stands on the other side.

    Attributes:
        ours: canonical name; ``{i}`` stands for the layer number.
        theirs: names in the Hugging Face state dict, ``{i}`` alike.
        read: their tensors, in the order of ``theirs`` -> ours.
        write: ours -> their tensors.
        vocabulary: whether dim 0 counts words, so that padding is cut off.
    """

    ours: str
    theirs: tuple[str, ...]
    read: Callable[..., Tensor]
    write: Callable[[Tensor], tuple[Tensor, ...]]
    vocabulary: bool = False

    def at_layer(self, index: int) -> Entry:
        """The entry with the layer number filled in."""
        number = str(index)
        theirs = tuple(name.replace("{i}", number) for name in self.theirs)
        return replace(self, ours=self.ours.replace("{i}", number), theirs=theirs)


def same(ours: str, theirs: str) -> Entry:
    """The same tensor under another name."""
    return Entry(ours, (theirs,), lambda x: x, lambda x: (x,))


def words(ours: str, theirs: str) -> Entry:
    """The same tensor, whose rows (dim 0) are words; ours may be padded."""
    return replace(same(ours, theirs), vocabulary=True)


def transposed(ours: str, theirs: str) -> Entry:
    """GPT-2's Conv1D stores (in, out) instead of (out, in); a bias stays as it is."""
    return Entry(ours, (theirs,), lambda x: x.t().contiguous(), lambda x: (x.t().contiguous(),))


def stacked(ours: str, *theirs: str) -> Entry:
    """Matrices of equal size that we hold as one, as blocks along dim 0."""

    def read(*parts: Tensor) -> Tensor:
        if len({part.shape for part in parts}) > 1:
            raise ValueError("they must have one shape")
        return torch.cat(parts)

    def write(x: Tensor) -> tuple[Tensor, ...]:
        parts = x.reshape(len(theirs), -1, *x.shape[1:]).unbind(0)
        return tuple(part.clone() for part in parts)  # safetensors refuses shared memory

    return Entry(ours, theirs, read, write)


def per_head(num_heads: int, blocks: int) -> Callable[[str, str], Entry]:
    """Their rows are ordered (head, block, head dim), ours (block, head, head dim).

    GPT-NeoX and BLOOM store the query, key and value rows of one head after another.
    """

    def swap(x: Tensor, first: int, second: int) -> Tensor:
        split = x.reshape(first, second, -1, *x.shape[1:])
        return split.transpose(0, 1).reshape(x.shape)

    def entry(ours: str, theirs: str) -> Entry:
        return Entry(
            ours,
            (theirs,),
            lambda x: swap(x, num_heads, blocks),
            lambda x: (swap(x, blocks, num_heads),),
        )

    return entry


def linear(
    make: Callable[..., Entry], ours: str, *theirs: str, bias: bool = True
) -> tuple[Entry, ...]:
    """Entries of a layer's weight and, if it has one, its bias."""
    return tuple(
        make(f"{ours}.{kind}", *(f"{name}.{kind}" for name in theirs))
        for kind in (("weight", "bias") if bias else ("weight",))
    )


@dataclass(frozen=True)
class HFFamily:
    """One Hugging Face architecture.

    Attributes:
        model_type: ``model_type`` in its config.json.
        architecture: class that loads it.
        config_from_hf: config.json (or ``config.to_dict()``) -> our config.
        config_to_hf: our config -> config.json.
        entries: the weight table of a config, with ``{i}`` patterns.
        base_prefix: prefix that checkpoints of the headless model lack.
        embedding, head: their names of the word embedding and of the output matrix; with tied
            weights the second is a copy of the first, checked on reading and not written.
        aliases: names in older checkpoints -> present ones.
        ignored: regular expressions of buffers in older checkpoints that hold no weights.
    """

    model_type: str
    architecture: str
    config_from_hf: Callable[[Mapping[str, Any]], Any]
    config_to_hf: Callable[[Any], dict[str, Any]]
    entries: Callable[[Any], Iterable[Entry]]
    base_prefix: str
    embedding: str
    head: str = "lm_head.weight"
    aliases: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def table(self, config: Any) -> list[Entry]:
        """One entry for each of our parameters."""
        table: list[Entry] = []
        for entry in self.entries(config):
            layered = "{i}" in entry.ours
            table += map(entry.at_layer, range(config.num_layers)) if layered else [entry]
        return table

    def from_hf(self, state_dict: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Full tensors by our names (vocabulary not padded), in the dtype that they come in.

        Args:
            state_dict: of the model class, or of its headless base when the head is tied.
            config: made by ``config_from_hf``.

        Raises:
            CheckpointError: a weight is missing, unknown or has a shape that does not fit.
        """
        found = self._present_names(state_dict)
        if config.tie_embeddings:
            self._check_tied_head(found)
        table = self.table(config)
        expected = [name for entry in table for name in entry.theirs]
        where = f"the {self.model_type} state dict"
        _check_names(found, expected, where, "compare num_layers, biases and tied weights")
        full = {}
        for entry in table:
            parts = [found[name] for name in entry.theirs]
            if entry.vocabulary and parts[0].shape[0] != config.vocab_size:
                raise CheckpointError(
                    f"{entry.theirs[0]} has {parts[0].shape[0]} rows but vocab_size = "
                    f"{config.vocab_size}; set vocab_size to the number of rows"
                )
            full[entry.ours] = _rearrange(entry.read, entry.theirs, *parts)
        return full

    def to_hf(self, full: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Their state dict from our full tensors; the inverse of ``from_hf``.

        Works on anything shaped like the weights, gradients too. Padded vocabulary rows are cut.

        Raises:
            CheckpointError: a weight is missing, unknown or has a shape that does not fit.
        """
        table = self.table(config)
        names = [entry.ours for entry in table]
        _check_names(full, names, "the model's weights", "compare with the run's model section")
        state_dict: dict[str, Tensor] = {}
        for entry in table:
            x = full[entry.ours]
            x = x[: config.vocab_size] if entry.vocabulary else x
            written = _rearrange(entry.write, (entry.ours,), x)
            state_dict.update(zip(entry.theirs, written, strict=True))
        return state_dict

    def _present_names(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        aliases = dict(self.aliases)
        headless = not any(name.startswith(self.base_prefix) for name in state_dict)
        found = {}
        for name, tensor in state_dict.items():
            present = aliases.get(name, name)
            if headless and present != self.head:
                present = self.base_prefix + present
            if not any(re.fullmatch(pattern, present) for pattern in self.ignored):
                found[present] = tensor
        return found

    def _check_tied_head(self, found: dict[str, Tensor]) -> None:
        head, embedding = found.pop(self.head, None), found.get(self.embedding)
        if head is None or embedding is None or head is embedding:
            return
        if head.shape != embedding.shape or not torch.equal(head, embedding):
            raise CheckpointError(
                f"tie_word_embeddings = true but {self.head} differs from {self.embedding}; set "
                "tie_word_embeddings = false to keep both"
            )


def load_full(parameters: Mapping[str, Tensor], full: Mapping[str, Tensor]) -> None:
    """Copy full tensors into this rank's parameters, in place.

    Padded vocabulary rows become zero. A pipeline stage passes its own names only:
    ``load_full(parameters, {name: full[name] for name in parameters})``.

    Args:
        parameters: this rank's, by canonical name, made by ``make_parameter``.
        full: a tensor of the whole model for each; vocabulary padded or not.

    Raises:
        CheckpointError: a name is missing or unknown, or a shape differs. Nothing is changed then.
    """
    _check_names(full, parameters, "the weights", "compare with the run's model section")
    wrong = []
    for name, parameter in parameters.items():
        spec, shape = spec_of(parameter), tuple(full[name].shape)
        unpadded = (spec.valid, *spec.full_shape[1:])
        if shape not in (spec.full_shape, unpadded):
            wanted = spec.full_shape if spec.valid is None else unpadded
            wrong.append(f"{name} is {shape}, expected {wanted}")
    if wrong:
        raise CheckpointError(
            f"{len(wrong)} weights have another shape than the model: {_listed(wrong, '; ')}; "
            "compare with the run's model section"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(spec_of(parameter).fit(full[name]))


def _rearrange(change: Callable[..., Any], names: tuple[str, ...], *tensors: Tensor) -> Any:
    try:
        return change(*tensors)
    except (RuntimeError, ValueError) as error:
        shapes = " and ".join(str(tuple(t.shape)) for t in tensors)
        raise CheckpointError(
            f"{', '.join(names)} of shape {shapes} cannot be converted: {error}; compare with the "
            "sizes in the config"
        ) from error


def _check_names(
    found: Mapping[str, Any], expected: Iterable[str], where: str, advice: str
) -> None:
    expected = dict.fromkeys(expected)
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    if not missing and not unexpected:
        return
    parts = [
        f"{label} {len(names)} ({_listed(names, ', ')})"
        for label, names in (("lacks", missing), ("has unexpected", unexpected))
        if names
    ]
    raise CheckpointError(f"{where} {' and '.join(parts)}; {advice}")


def _listed(items: list[str], separator: str) -> str:
    more = len(items) - _SHOWN
    return separator.join(items[:_SHOWN]) + (f"{separator}and {more} more" if more > 0 else "")
