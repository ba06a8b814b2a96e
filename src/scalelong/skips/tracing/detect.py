"""Detect the long skips of a model in one traced forward pass: where they are made and used, their sizes and hook points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from scalelong.errors import NoLongSkipsError, did_you_mean
from scalelong.scaling.constant import SkipSize
from scalelong.skips.families import generated_example
from scalelong.skips.long_skip import Call, LongSkip, as_nests
from scalelong.skips.tracing.hook_points import find_hook_point
from scalelong.skips.tracing.nesting import find_long_skips
from scalelong.skips.tracing.paths import SkipPath, merge_repeats, paths_to
from scalelong.skips.tracing.trace import INPUT, ModuleCall, Trace, trace


@dataclass(frozen=True)
class Detection:
    """A traced forward pass and its long skips, outermost first."""

    trace: Trace
    paths: list[SkipPath]

    def skips(self) -> list[LongSkip]:
        """The skips with their hook points; raises a `NoLongSkipsError` if one has none."""
        found = []
        for index, path in enumerate(self.paths, start=1):
            call, slot, node, also = find_hook_point(self.trace, path)
            made_in, used_in = _made_in(self.trace, path.source), _used_in(self.trace, path, call)
            size = replace(_size(self.trace, path, node), nest=path.nest)
            found.append(LongSkip(index, made_in, used_in, size, "unknown", call.name, slot, also))
        return found

    def operand_shapes(self) -> list[tuple[int, ...]]:
        """The shape of each skip where it is joined."""
        return [self.trace.nodes[path.nodes[-1]].shape for path in self.paths]


Names = tuple[str, str]  # made_in, used_in


def detect(model: nn.Module, call: Call, given: Sequence[Sequence[Names]] = ()) -> Detection:
    """Run the model once on the example and find its long skips, or those given per U.

    The model and all random states are left unchanged.
    """
    traced = trace(model, call)
    return Detection(traced, _named_paths(traced, given) if given else find_long_skips(traced))


def _named_paths(trace: Trace, given: Sequence[Sequence[Names]]) -> list[SkipPath]:
    """The paths between the named modules, numbered as given."""
    paths = merge_repeats(trace, [path for node in trace.nodes for path in paths_to(trace, node)])
    inside = {path: _receivers(trace, path) for path in paths}
    found = []
    for number, nest in enumerate(given, start=1):
        for made_in, used_in in nest:
            made = [path for path in paths if made_in in made_names(trace, path.source)]
            fits = [path for path in made if used_in in inside[path]]
            around = [path for path in made if used_in in _around(trace, path)]
            if len(fits or around) != 1:
                known = [(made_names(trace, path.source)[-1], inside[path][0]) for path in paths]
                raise _unknown_skip((made_in, used_in), known, len(fits))
            found.append(replace((fits or around)[0], nest=number))
    return found


def _receivers(trace: Trace, path: SkipPath) -> list[str]:
    """The modules that receive the joined tensor, and the one that joins it."""
    calls = [call.name for call in trace.calls if any(node == path.join for _, node in call.inputs)]
    return [*calls, trace.module_name(path.join)]


def _around(trace: Trace, path: SkipPath) -> list[str]:
    return [trace.calls[index].name for index in trace.stack(trace.nodes[path.join].call)]


def _unknown_skip(names: Names, known: Sequence[Names], matches: int) -> ValueError:
    arrows = [f"{made_in} -> {used_in}" for made_in, used_in in known]
    wrong = f"{matches} skips are" if matches else "no skip is"
    hint = did_you_mean(" -> ".join(names), arrows)
    listed = ", ".join(dict.fromkeys(arrows))
    return ValueError(f"skips: {wrong} made in {names[0]!r} and used in {names[1]!r}; {hint}the model has {listed}")


def choose(known: Sequence[LongSkip], given: Sequence[Sequence[Names]]) -> list[LongSkip]:
    """Select the given skips per U from the known ones, numbered as given."""
    by_names = {(skip.made_in, skip.used_in): skip for skip in known}
    found: list[LongSkip] = []
    for number, nest in enumerate(given, start=1):
        for names in nest:
            if names not in by_names:
                raise _unknown_skip(names, list(by_names), 0)
            skip = by_names[names]
            found.append(replace(skip, index=len(found) + 1, size=replace(skip.size, nest=number), given=True))
    return found


def detect_all(model: nn.Module, skips: Sequence[LongSkip], call: Call | None) -> Detection:
    """Like `detect`, but raise unless the number of skips matches the known one. call None: a generated example."""
    found = detect(
        model, call or generated_example(model), as_nests(skips) if any(skip.given for skip in skips) else ()
    )
    if len(found.paths) != len(skips):
        raise NoLongSkipsError(f"model: {len(skips)} skips are known, {len(found.paths)} are found in a forward pass")
    return found


def _made_in(trace: Trace, node: int) -> str:
    """The outermost module whose only output is the node, else the one whose forward computes it."""
    return _makers(trace, node)[0]


def _makers(trace: Trace, node: int) -> list[str]:
    """The modules whose only output is the node, outermost first, then the one whose forward computes it."""
    if trace.nodes[node].name == INPUT:
        return [INPUT]
    around = [trace.calls[index] for index in trace.stack(trace.nodes[node].call)]
    giving = [call for call in around if call.returned == {node} and call.parent >= 0]
    return [call.name for call in giving + around[-1:]] or [""]


def made_names(trace: Trace, node: int) -> list[str]:
    """Names of the source of a skip; last, the module whose output is only activated or reshaped by its caller."""
    names, at = [*_makers(trace, node), trace.module_name(node)], trace.nodes[node]
    while len(at.parents) == 1 and at.weight is None:
        at = trace.nodes[at.parents[0]]
    return [*names, _made_in(trace, at.index)]


def _used_in(trace: Trace, path: SkipPath, consumer: ModuleCall) -> str:
    """The module inside the consumer that receives the joined tensor, else the consumer."""
    inside = (call for call in trace.calls[consumer.index + 1 :] if call.start < consumer.end)
    return next((call.name for call in inside if any(node == path.join for _, node in call.inputs)), consumer.name)


def _size(trace: Trace, path: SkipPath, node: int) -> SkipSize:
    shape = trace.nodes[node].shape
    last = _channels_last(trace, path, len(shape))
    if not last or len(shape) != 3:
        return SkipSize(shape[-1] if last else shape[1], channels_last=last)
    given = [node.shape for node in trace.nodes if node.name == INPUT and node.shape]
    one_each = [each[0] for each in given if len(each) == 1 and each[0] > 1]  # times or labels
    batch_size = next(iter([*one_each, *(each[0] for each in given)]), 0)
    batch_dim = int(shape[0] != shape[1] == batch_size)
    return SkipSize(shape[-1], shape[1 - batch_dim], channels_last=True, batch_dim=batch_dim)


def _channels_last(trace: Trace, path: SkipPath, ndim: int) -> bool:
    """Channel layout from the concatenation, or else from the first layer after the join (linear: channels last)."""
    if ndim == 2:
        return False  # (B, C)
    if path.op.dim is not None and (path.op.dim != 1 or ndim > 3):
        return path.op.dim == ndim - 1
    seen = [path.join]
    for node in seen:
        if trace.nodes[node].weight:
            return not trace.nodes[node].name.startswith("conv")
        seen += [child for child in trace.children[node] if child not in seen]
    return False
