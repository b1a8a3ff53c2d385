"""Weight tables: how a Hugging Face state dict corresponds to our canonical parameters.

A family is a list of entries, each a pattern of our name, the names on the other side and a
lossless rearrangement in both directions. Everything else (layers, missing and unexpected names,
tied heads, vocabulary padding, tensor-parallel shards) is done here once for all families.

Entries do not depend on each other, so a converter may also walk over ``HFFamily.table`` and hold
one parameter at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ds_engine.config.reader import show
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


def layered(entries: Iterable[Entry], count: int) -> Iterator[Entry]:
    """The entries of one stack, those with ``{i}`` once for each of its ``count`` layers."""
    for entry in entries:
        if "{i}" in entry.ours:
            yield from map(entry.at_layer, range(count))
        else:
            yield entry


def _nothing(config: Any) -> Mapping[str, str | None]:
    return {}


@dataclass(frozen=True)
class HFFamily:
    """One Hugging Face architecture.

    Attributes:
        model_type: ``model_type`` in its config.json.
        architecture: class that loads it; of several that share a config.json, the largest.
        config_from_hf: config.json (or ``config.to_dict()``) -> our config.
        config_to_hf: our config -> config.json.
        entries: the weight table of a config; ``{i}`` stands for each of ``num_layers`` layers, and
            a model of several stacks fills it in itself (``layered``).
        base_prefix: prefix that checkpoints of the headless model lack.
        embedding, head: their names of the word embedding and of the output matrix; with tied
            weights the second is a copy of the first.
        copies: further names of a config that hold nothing of their own: name -> the one that it
            is a copy of, or None where it is not used. See ``spare``.
        aliases: regular expression of names in older checkpoints, template of the present ones.
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
    copies: Callable[[Any], Mapping[str, str | None]] = _nothing
    aliases: tuple[tuple[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    def table(self, config: Any) -> list[Entry]:
        """One entry for each of our parameters."""
        return list(layered(self.entries(config), config.num_layers))

    def spare(self, config: Any) -> dict[str, str | None]:
        """Their names that hold nothing of their own: checked on reading, and not written.

        Returns:
            Name -> the one that it must be a copy of, or None where it is not used.
        """
        tied: dict[str, str | None] = {self.head: self.embedding}
        return {**self.copies(config), **(tied if config.tie_embeddings else {})}

    def from_hf(
        self, state_dict: Mapping[str, Tensor], config: Any, *, headless: bool = False
    ) -> dict[str, Tensor]:
        """Full tensors by our names (vocabulary not padded), in the dtype that they come in.

        Args:
            state_dict: of the model class, or of its headless base when that lacks no weight of
                ours (a tied head of a decoder).
            config: made by ``config_from_hf``.
            headless: the weights are a headless base's (``BertModel``), and so are those returned;
                the heads keep their initial values:
                ``load_full({name: parameters[name] for name in full}, full)``.

        Raises:
            CheckpointError: a weight is missing, unknown or has a shape that does not fit.
        """
        found = self._present_names(state_dict)
        self._drop_spare(found, config)
        table = [entry for entry in self.table(config) if not headless or self._in_base(entry)]
        expected = [name for entry in table for name in entry.theirs]
        where = f"the {self.model_type} state dict"
        _check_names(found, expected, where, "compare num_layers, biases, heads and tied weights")
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

    def _in_base(self, entry: Entry) -> bool:
        """Whether the headless model has this weight."""
        return all(n.startswith(self.base_prefix) and n != self.head for n in entry.theirs)

    def _present_names(self, state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
        lacks_prefix = not any(name.startswith(self.base_prefix) for name in state_dict)
        found = {}
        for name, tensor in state_dict.items():
            present = self._without_alias(name)
            if lacks_prefix and present != self.head:
                present = self.base_prefix + present
            if not any(re.fullmatch(pattern, present) for pattern in self.ignored):
                found[present] = tensor
        return found

    def _without_alias(self, name: str) -> str:
        for pattern, template in self.aliases:
            if match := re.fullmatch(pattern, name):
                return match.expand(template)
        return name

    def _drop_spare(self, found: dict[str, Tensor], config: Any) -> None:
        for name, original in self.spare(config).items():
            copy = found.pop(name, None)
            kept = None if original is None else found.get(original)
            if copy is None or kept is None or copy is kept:
                continue
            if copy.shape != kept.shape or not torch.equal(copy, kept):
                tied = f"tie_word_embeddings = {show(config.tie_embeddings)}"
                advice = "; set it to false to keep both" if config.tie_embeddings else ""
                raise CheckpointError(
                    f"{name} differs from {original}, whose copy it is in a {self.model_type} "
                    f"model with {tied}{advice}"
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
