"""Decide which joins of a traced forward pass are long skips.

A skip path leaves the main path at a source and joins it again at a cat, add or lerp, after weighted ops. Of the paths that
are joined the same way in modules of one class, those of blocks (residuals, dense blocks) follow each other; long skips
nest: the first made is the last used. A network with several Us (branches, twin decoders, Us in a row) has several nests:
skips of one U depend on each other, those of two do not enclose each other.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from scalelong.skips.tracing.paths import SkipPath, count_weights, merge_repeats, paths_to, refusal
from scalelong.skips.tracing.trace import Trace

_NAME_THEM = "name those to scale, apply(..., skips=...)"
Nest = tuple[list[SkipPath], str | None]  # skips of one or several Us, outermost first; why they cannot be scaled
Group = tuple[object, ...]  # how and where a path is joined


def find_long_skips(trace: Trace) -> list[SkipPath]:
    """The long skips of a traced network per U, outermost first; raises a `NoLongSkipsError` if there are none."""
    every = [list(paths_to(trace, node)) for node in trace.nodes]
    by_join = [[path for path in found if trace.depth[path.source]] for found in every]
    crowded = [found for found in by_join if len(found) > 1]  # joins of dense blocks
    dense = {path.source for found in crowded for path in found}
    paths = [found[0] for found in by_join if len(found) == 1 and found[0].source not in dense]
    groups: dict[Group, list[SkipPath]] = defaultdict(list)
    for path in paths:
        groups[_group(trace, path)].append(path)
    nests = [_nest_of(trace, group) for group in groups.values()]
    longest = max((len(nest) for nest, _ in nests), default=0)
    if longest == 0:
        if twice := _joined_twice(trace, crowded):
            raise refusal(trace, f"its skips cannot be scaled one by one: {twice}")
        detail = f", or several at once, as in {trace.module_name(crowded[0][0].join)}" if crowded else ""
        within = f"tensors are joined (by cat, add or lerp) only within one block{detail}"
        raise refusal(trace, f"it has no long skip connections: {within}")
    tied = [(nest, trouble) for nest, trouble in nests if len(nest) == longest]
    clean = [nest for nest, trouble in tied if trouble is None]
    if not clean:
        raise refusal(trace, f"its skips cannot be scaled one by one: {tied[0][1]}")
    chosen = list(clean[0])
    for nest, trouble in nests:
        others = len(nest) > 1 and trouble is None and nest is not clean[0]
        if others and not any(_related(trace, a, b) for a in nest for b in chosen):
            chosen += [replace(path, nest=path.nest + chosen[-1].nest) for path in nest]  # another U
        elif others and len(nest) == longest:
            where = " and ".join(sorted(trace.module_name(each[0].join) for each in clean))
            several = f"it has several nests of {longest} skips, joined in {where}"
            raise refusal(trace, f"{several}; it is ambiguous which to scale: {_NAME_THEM}")
    chosen = _with_inputs(trace, chosen, every)
    missed = None
    if (join := _unexplained_join(trace, chosen)) is not None:
        where, at = trace.module_name(join), trace.nodes[join].join
        twice = _joined_twice(trace, [found for found in crowded if found[0].join == join])
        what = "something in the same way that does not come straight from the layers before it"
        if at is not None and len(set(at.operands)) == 1:
            what = "its input with itself, a skip around nothing"
        missed = twice or f"{where} joins {what}"
    elif other := _left_out(trace, chosen, nests) or _same_around(chosen, paths):
        missed = f"{trace.module_name(other.join)} joins another (by {other.op.kind}) in another way or class of module"
    if missed:
        clear = f"{len(chosen)} of its skips are clear, but {missed}"
        raise refusal(trace, f"{clear}; not all skips would be scaled: {_NAME_THEM}")
    return chosen


def _group(trace: Trace, path: SkipPath) -> Group:
    return _module_class(trace, path.owner), path.op.kind, path.op.kind == "add" and path.around_one_module


def _joined_by(trace: Trace, path: SkipPath) -> Group:
    """The group of a path, and the class of the module that joins it."""
    return *_group(trace, path), _module_class(trace, trace.nodes[path.join].call)


def _joined_twice(trace: Trace, crowded: Sequence[Sequence[SkipPath]]) -> str | None:
    """A join that uses one tensor for two of its operands."""
    for found in crowded:
        nodes, count = Counter(path.nodes for path in found).most_common(1)[0]
        if count > 1:
            where = trace.module_name(found[0].join)
            return f"{where} joins the output of {trace.module_name(nodes[0])} {count} times at once"
    return None


def _with_inputs(trace: Trace, chosen: list[SkipPath], every: Sequence[Sequence[SkipPath]]) -> list[SkipPath]:
    """Add the network's input as outermost skip of a U that joins it like the others."""
    found = []
    for number in range(1, chosen[-1].nest + 1):
        nest = [path for path in chosen if path.nest == number]
        for path in itertools.chain(*every):
            here, alike = trace.nodes[path.join].call, _joined_by(trace, path) == _joined_by(trace, nest[0])
            if trace.depth[path.source] or not alike or (path.op.kind == "add" and len(trace.stack(here)) <= 1):
                continue  # x + f(x) around the whole network is a residual
            if encloses(trace, path, nest[0]):
                found.append(replace(path, nest=number))
                break
        found += nest
    return found


def _nest_of(trace: Trace, group: list[SkipPath]) -> Nest:
    """The long skips in a group of paths: none if the paths follow each other or only go around one block."""
    group = merge_repeats(trace, group)
    if _is_stack(trace, group):
        return sorted(group, key=lambda path: -path.join), None
    uses = Counter(path.source for path in group)
    # what many layers project for themselves may be a condition
    plain = [path for path in group if uses[path.source] == 1 or not count_weights(trace, path.nodes)]
    nests = _split(trace, plain) or _split(trace, group)
    longest = max((nest for nest, _ in nests), key=len, default=[])
    if not longest or (len(longest) == 1 and (len(group) > 1 or _is_block(trace, longest[0]))):
        return [], None
    if 2 <= len(longest) <= _modules_in_a_row(trace, [path for path in group if uses[path.source] == 1]):
        return [], None  # blocks with several streams
    found = [nest for nest, rest in nests if len(nest) > 1 or nest is longest]
    numbered = [replace(path, nest=number) for number, nest in enumerate(found, start=1) for path in nest]
    for path in group:  # a condition that is made before the first skip does not count
        again = uses[path.source] > 1 and not any(_same_path(path, each) for each in numbered)
        if again and (path.source > longest[0].source or not count_weights(trace, path.nodes)):
            return longest, f"the output of {trace.module_name(path.source)} is joined more than once"
    left = [path for _, rest in nests for path in rest] + [n[0] for n, _ in nests if len(n) == 1 and n is not longest]
    if not left:
        return numbered, None
    where = f"the one from {trace.module_name(left[0].source)} to {trace.module_name(left[0].join)} does not fit in"
    clear = f"{len(longest)} of them enclose each other, but {where}"
    return longest, f"{clear}; name those of each U: apply(..., skips=[[(made_in, used_in), ...], ...])"


def _same_path(a: SkipPath, b: SkipPath) -> bool:
    return (a.join, a.position) == (b.join, b.position)


def _split(trace: Trace, paths: Sequence[SkipPath]) -> list[tuple[list[SkipPath], list[SkipPath]]]:
    """For each U: its longest nest, and related paths outside it."""
    parts: list[list[SkipPath]] = []
    for path in paths:
        mine = [part for part in parts if any(_related(trace, path, other) for other in part)]
        parts = [part for part in parts if part not in mine] + [[each for part in mine for each in part] + [path]]
    found = []
    for part in parts:
        uses = Counter(path.source for path in part)
        nest = longest_nest(trace, [path for path in part if uses[path.source] == 1])
        found.append((nest, [path for path in part if not any(_same_path(path, each) for each in nest)]))
    found = [(nest, rest) for nest, rest in found if nest]
    return sorted(found, key=lambda each: each[0][0].source)


def encloses(trace: Trace, outer: SkipPath, inner: SkipPath) -> bool:
    """True if the inner path starts and ends inside the outer one, as in one U."""
    inside = outer.source < inner.source and inner.join < outer.join
    return inside and trace.leads_to(outer.source, inner.source) and trace.leads_to(inner.join, outer.join)


def _related(trace: Trace, a: SkipPath, b: SkipPath) -> bool:
    return encloses(trace, a, b) or encloses(trace, b, a)


def longest_nest(trace: Trace, paths: Sequence[SkipPath]) -> list[SkipPath]:
    """The longest chain of paths that enclose each other, outermost first."""
    ordered = sorted(paths, key=lambda path: (path.source, -path.join))
    best: list[list[SkipPath]] = []
    for at, path in enumerate(ordered):
        outer = [best[k] for k in range(at) if encloses(trace, ordered[k], path)]
        best.append([*max(outer, key=len, default=[]), path])
    return max(best, key=len, default=[])


def _is_stack(trace: Trace, group: Sequence[SkipPath]) -> bool:
    """Concatenations that pop a stack with repeated entries, left by an encoder stage without effect."""
    ordered = sorted(group, key=lambda path: path.join)
    sources = [path.source for path in ordered]
    chained = all(trace.leads_to(a.join, b.join) for a, b in itertools.pairwise(ordered))
    popped = chained and sources == sorted(sources, reverse=True) and all(path.op.kind == "cat" for path in group)
    return popped and 1 < len(set(sources)) < len(sources)


def _is_block(trace: Trace, path: SkipPath) -> bool:
    """x + f(x) around one module or in a module that receives x, or x concatenated with several branches of it."""
    if path.op.kind == "cat":
        return sum(each is not None and trace.leads_to(path.source, each) for each in path.op.operands) > 2
    if path.owner < 0 or path.around_one_module:
        return path.owner >= 0
    return path.source < trace.calls[path.owner].start and trace.nodes[path.join].call == path.owner


def _modules_in_a_row(trace: Trace, paths: Sequence[SkipPath]) -> int:
    """Number of consecutive, non-nested module calls that own these paths."""
    owners = sorted({path.owner for path in paths if path.owner >= 0}, key=lambda owner: trace.calls[owner].end)
    count, end = 0, -1
    for owner in owners:
        if trace.calls[owner].start >= end:
            count, end = count + 1, trace.calls[owner].end
    return count


def _left_out(trace: Trace, chosen: list[SkipPath], nests: Sequence[Nest]) -> SkipPath | None:
    """A long skip of another group: it nests with all chosen ones, or others nest with it, as in a second U."""
    known, number = _joins(chosen), chosen[-1].nest
    for nest, trouble in nests:
        if nest and nest[0].join in known:
            continue
        if len(nest) > 1 and trouble is None:
            return nest[0]
        for path, own in itertools.product(nest, range(1, number + 1)):
            one_u = [each for each in chosen if each.nest == own]
            added = path.op.kind == "add" and trace.nodes[path.join].call == path.owner
            if added and all(_is_inside(path, each) for each in one_u):
                continue  # the residual of the middle
            if all(_is_inside(path, each) or _is_inside(each, path) for each in one_u):
                return path
    return None


def _same_around(nest: Sequence[SkipPath], paths: Sequence[SkipPath]) -> SkipPath | None:
    """For nested x + f(x) skips: another such path around the innermost."""
    if nest[0].op.kind != "add" or not nest[0].around_one_module:
        return None
    known = _joins(nest)
    alike = (path for path in paths if path.op.kind == "add" and path.around_one_module and path.join not in known)
    return next((path for path in alike if _is_inside(nest[-1], path)), None)


def _is_inside(inner: SkipPath, outer: SkipPath) -> bool:
    return outer.source <= inner.source and inner.join < outer.join


def _joins(nest: Sequence[SkipPath]) -> set[int]:
    return {each.join for path in nest for each in (path, *path.earlier)}


def _unexplained_join(trace: Trace, nest: Sequence[SkipPath]) -> int | None:
    """A join of the same kind, in a module of the same class, that is not part of the nest."""
    explained = _joins(nest)
    kinds = {(path.op.kind, _module_class(trace, trace.nodes[path.join].call)) for path in nest}
    for node in trace.nodes:
        join = node.join
        if node.index in explained or join is None or join.kind == "add":
            continue  # adds are everywhere
        if node.index < min(explained) and len(trace.stack(node.call)) <= 1:
            continue  # the model itself joins conditions to its input
        operands = [operand for operand in join.operands if operand is not None and trace.depth[operand]]
        if len(operands) > 1 and (join.kind, _module_class(trace, node.call)) in kinds:
            return node.index
    return None


def _module_class(trace: Trace, call: int) -> str:
    """Name of a module's class; classes created dynamically by one function compare equal."""
    made = type(trace.calls[call].module) if call >= 0 else None
    return f"{made.__module__}.{made.__qualname__}" if made else ""
