"""Exports the user's model to a forward graph on fake tensors."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from autopar._torch import (
    DynamicOutputShapeException,
    FakeTensorMode,
    HigherOrderOperator,
    OpOverload,
    changes_arguments,
    is_functionalized,
    without_causal_detection,
    without_export_prints,
    without_leftover_hooks,
)
from autopar.attributes import AttributeOutput, Held, Place, record_attributes, restored_attributes
from autopar.bindings import AttributeKey, table_key
from autopar.errors import AutoparError, CaptureError
from autopar.structure import Structure
from autopar.tracer import attribute_outputs, functions
from autopar.tracer.adaptive_softmax import clusters_of_all_samples
from autopar.tracer.blame import AS_AN_OP, UNROLLED, capture_error, user_line
from autopar.tracer.calls import Call, FlatModel, LastCall
from autopar.tracer.checks import assume_checks_pass
from autopar.tracer.combinations import combinations_by_index
from autopar.tracer.convert import source_line
from autopar.tracer.ctc import ctc_losses_as_ops, drop_packed_selections
from autopar.tracer.cumulative_batch_norm import cumulative_batch_norms
from autopar.tracer.cutting import cut
from autopar.tracer.derivatives import DerivativeError, refused_derivatives
from autopar.tracer.device_neutral import device_neutral_ops
from autopar.tracer.equal_masks import merge_equal_masks
from autopar.tracer.expert_loops import stack_expert_loops
from autopar.tracer.experts import experts_by_token
from autopar.tracer.hit_experts import Unrolled
from autopar.tracer.hugging_face import masks_as_in_eager, without_caches
from autopar.tracer.linear_algebra import unchecked_covariances
from autopar.tracer.normalize import CONTEXTS
from autopar.tracer.packed import packed_by_mask
from autopar.tracer.python_state import DependencyRecorder, restored_state, tensors_in
from autopar.tracer.randomness import refuse_python_random
from autopar.tracer.reads import answering
from autopar.tracer.repeated import IrregularError, Run, repeated_blocks
from autopar.tracer.side_effects import refused_side_effects
from autopar.tracer.skipping import skipping
from autopar.tracer.slow_captures import telling_where


@dataclass(frozen=True)
class Exported:
    """A forward graph of ATen ops, the structure of what the model returned, and which outputs have gradients.

    Args:
        program: None if the forward takes derivatives, which no exported graph holds.
        values: fake tensors of the outputs: those returned, and those stored in attributes.
        notices: differences between the program and the model, one sentence each.
        cut: runs of equal blocks whose middle was not run.
        changed: attributes that the forward changes, or stores outputs in.
        attribute_outputs: what the forward stores in attributes, as further outputs.
        lost: names of places that hold tensors no output of a program can reach.
        excluded: attributes whose tensors are not outputs, because calls do not store them alike.
    """

    program: torch.export.ExportedProgram | None
    values: Sequence[Any]
    returned: Structure
    differentiable: tuple[bool, ...]
    notices: tuple[str, ...] = ()
    cut: tuple[Run, ...] = ()
    changed: tuple[AttributeKey, ...] = ()
    attribute_outputs: tuple[AttributeOutput, ...] = ()
    lost: tuple[str, ...] = ()
    excluded: frozenset[Place] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all outputs."""
        return (*self.returned.paths, *(path for each in self.attribute_outputs for path in each.value.paths))


def export(model: nn.Module, call: Call, mode: FakeTensorMode, *, whole: bool = False) -> Exported:
    """Export the forward of ``model``, which is on fake tensors.

    Args:
        whole: run every block, even in a run of equal ones.

    Raises:
        CaptureError: capture failed; it names the line of the user's code.
        IrregularError: blocks that looked equal are not.
    """
    runs = () if whole else repeated_blocks(model)
    try:
        with without_export_prints():
            return _export_unrolled(model, call, mode, runs)
    except DerivativeError:
        raise
    except AutoparError as error:
        if runs:  # an export without skipping gives the error that the user should see
            raise IrregularError from error
        raise


def _export_unrolled(model: nn.Module, call: Call, mode: FakeTensorMode, runs: Sequence[Run]) -> Exported:
    """Export; loops over experts that were hit go through all, if the program for a single one is the same."""
    tried: dict[int, Unrolled] = {}
    for only in (1, 0, None):
        if only == 0 and 2 not in tried[1].lengths:
            continue  # of three or more experts, the second is neither the first nor the last
        unrolled = Unrolled(only)
        try:
            made = _export(model, call, mode, runs, unrolled)
        except (DerivativeError, IrregularError):
            raise
        except AutoparError:
            if not unrolled.lengths:
                raise
            break
        if not unrolled.lengths:
            return made
        if only is not None:
            tried[only] = unrolled
        elif all(unrolled.programs[e] == one.programs[e] for e, one in tried.items()) and not unrolled.left:
            return made
    return _export(model, call, mode, runs)


def _export(
    model: nn.Module, call: Call, mode: FakeTensorMode, runs: Sequence[Run], unrolled: Unrolled | None = None
) -> Exported:
    plain = dict(call.structure.plain)
    cached = without_caches(model) and plain.get("use_cache") is not False
    flat, overridden = FlatModel(model, call.structure), list[str]()
    flat.returned.excluded, findings = frozenset(), attribute_outputs.Findings()
    try:
        with (
            masks_as_in_eager(call.names, cached=cached),
            functions.opaque(overridden),
            refuse_python_random(lambda: flat(*call.tensors)),
            device_neutral_ops(),
            refused_derivatives(),
            ctc_losses_as_ops(),
            cumulative_batch_norms(),
            experts_by_token(),
            refused_side_effects(overridden),
            packed_by_mask(),
            clusters_of_all_samples(),
            unchecked_covariances(),
            combinations_by_index(),
            without_causal_detection(),
            _answered_requests(unrolled) as checks,
            skipping(model, runs) as skipped,
            without_leftover_hooks(),
            telling_where(),
        ):
            with restored_state(model):
                program = _exported(flat, call)
            changes = flat.returned.changes or flat.returned.attribute_outputs
            equal = cut(skipped, program.graph) and not (skipped.cut and changes)
            if changes and equal:
                with restored_state(model):
                    findings = attribute_outputs.trial_calls(flat, flat.returned, call.tensors, mode)
                if findings.unusable:
                    flat.returned.excluded = findings.unusable
                    with restored_state(model):
                        program = _exported(flat, call)
                with restored_state(model):
                    _refuse_state(program, flat, call, mode, findings.fixed)
    except DerivativeError:
        raise
    except CaptureError as error:
        raise _located(error) from error.__cause__
    except Exception as error:
        raise capture_error(model, error) from error
    if not equal:
        raise IrregularError
    for part in program.graph_module.modules():  # code under no_grad or autocast is a graph of its own
        if isinstance(part, fx.GraphModule):
            _refuse_functions(part.graph)
            _refuse_sparse(part.graph)
            drop_packed_selections(part.graph)
    merge_equal_masks(program.graph)
    returned = flat.returned.structure
    assert returned is not None
    if unrolled is not None:
        unrolled.simplify(program, returned)
    stack_expert_loops(program.graph)
    if unrolled is not None:
        unrolled.finish(program)
    notices = (*_notices(flat.returned, cached, checks, overridden), *_dense_gradients(program.graph))
    notices += () if unrolled is None else tuple(unrolled.notices)
    values = _output_values(program)
    return Exported(
        program,
        values,
        returned,
        flat.returned.differentiable,
        notices,
        tuple(skipped.cut),
        _changed_attributes(flat, findings.attribute_outputs),
        findings.attribute_outputs,
        findings.lost,
    )


@contextlib.contextmanager
def _answered_requests(unrolled: Unrolled | None = None) -> Iterator[list[str]]:
    """Answer, while tracing, requests for values of tensors from checks that pass, from buffers, and by unrolling."""
    loops = contextlib.nullcontext() if unrolled is None else unrolled.unrolling()
    with loops, answering(), assume_checks_pass() as checks:  # a check looks at its caller's line, so it comes first
        yield checks


def _exported(flat: FlatModel, call: Call) -> torch.export.ExportedProgram:
    with attribute_outputs.same_objects(flat.model), warnings.catch_warnings():
        # Recurrent layers keep a list of their parameters, in which capture puts its own.
        warnings.filterwarnings("ignore", message=".*_flat_weights")
        warnings.filterwarnings("ignore", message=".*assigned during export")
        program = torch.export.export(flat, call.tensors, strict=False)
    for node in program.graph.nodes:  # torch forgets readers beside a set_grad_enabled that changes nothing
        for read in node.all_input_nodes:
            read.users.setdefault(node)
    return program


def run_once(model: nn.Module, call: Call) -> Exported:
    """Run ``model`` once on fake tensors, and describe what it returns.

    Raises:
        CaptureError: it does not run on them.
    """
    cached = without_caches(model)
    flat, overridden = FlatModel(model, call.structure), list[str]()
    try:
        with (
            refuse_python_random(lambda: flat(*call.tensors)),
            refused_side_effects(overridden),
            _answered_requests() as checks,
        ):
            flat.returned.excluded = frozenset()
            with restored_state(model):
                findings = attribute_outputs.trial_calls(flat, flat.returned, call.tensors, contextlib.nullcontext())
            flat.returned.excluded = findings.unusable
            with restored_state(model):
                values = flat(*call.tensors)
    except CaptureError as error:
        raise _located(error) from error.__cause__
    except Exception as error:
        raise capture_error(model, error) from error
    assert flat.returned.structure is not None
    notices = _notices(flat.returned, cached, checks, overridden)
    return Exported(
        None,
        values,
        flat.returned.structure,
        flat.returned.differentiable,
        tuple(notices),
        (),
        _changed_attributes(flat, findings.attribute_outputs),
        findings.attribute_outputs,
        findings.lost,
        findings.unusable,
    )


def _changed_attributes(flat: FlatModel, outputs: Sequence[AttributeOutput]) -> tuple[AttributeKey, ...]:
    places = [place for each in outputs for place in (each.place, *each.also)]
    given = [(table_key(flat.model.get_submodule(path)), name) for path, name in places]
    return *given, *((table_key(c.place.owner), c.place.name) for c in flat.returned.changes.values())


def _output_values(program: torch.export.ExportedProgram) -> list[Any]:
    output = next(n for n in program.graph.nodes if n.op == "output")
    specs = program.graph_signature.output_specs
    user = [a for a, s in zip(output.args[0], specs, strict=True) if s.kind.name == "USER_OUTPUT"]
    return [a.meta["val"] if isinstance(a, fx.Node) else a for a in user]


def _refuse_functions(graph: fx.Graph) -> None:
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if isinstance(node.target, HigherOrderOperator) and name.startswith("triton_kernel_wrapper"):
            raise CaptureError(
                "The forward launches a Triton kernel, whose results and gradient a graph does not know.",
                found=source_line(node.meta) or name,
                hint=AS_AN_OP,
            )
        if isinstance(node.target, HigherOrderOperator) and name not in CONTEXTS:
            raise CaptureError(
                f"The forward calls {name}, which takes functions, and those would need plans of their own.",
                found=source_line(node.meta) or name,
                hint=UNROLLED,
            )


def refuse_changed_arguments(graph: fx.Graph) -> None:
    """Refuse ops that change their arguments, because ops of a plan return what they make.

    A custom op that does is called on copies of them, and what it changed are results of the call, if torch can do so.

    Raises:
        CaptureError: an op changes its arguments, and torch could not turn it into such a call.
    """
    for node in graph.nodes:
        if is_functionalized(node.target):
            continue
        op = node.args[0] if str(node.target).startswith("auto_functionalized") else node.target
        if changes_arguments(op):
            raise CaptureError(
                f"The forward calls {op}, a custom op that changes its arguments.",
                found=source_line(node.meta) or str(op._schema),
                hint="let the op return its result: @custom_op(..., mutates_args=()), with a copy of the argument.",
            )


def _refuse_sparse(graph: fx.Graph) -> None:
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise CaptureError(
                "The forward creates a sparse tensor, which cannot be sharded.",
                found=source_line(node.meta) or str(value.layout),
                hint="keep its indices and values as two dense tensors, and write a product with it as index_select, "
                "a multiplication and index_add.",
            )


def _dense_gradients(graph: fx.Graph) -> list[str]:
    """Return a notice if a gradient would be a sparse tensor on one device."""
    for node in graph.nodes:
        names = [a.name for a in node.target._schema.arguments] if isinstance(node.target, OpOverload) else []
        options = "sparse" in names and dict(zip(names, node.args, strict=False)) | node.kwargs
        if options and options.get("sparse"):
            return ["gradients of embeddings with sparse=True are dense: SparseAdam cannot take them, AdamW can"]
    return []


def _refuse_state(
    program: torch.export.ExportedProgram,
    flat: FlatModel,
    call: Call,
    mode: FakeTensorMode,
    fixed: Sequence[AttributeOutput],
) -> None:
    """Refuse a forward whose second call would be another program because of Python data that the first one changed.

    Data that is only for show is fine, and so are caches of what never changes.

    Args:
        fixed: caches, which the second call finds as the first did.

    Raises:
        CaptureError: the second call would be another program.
    """
    before: dict[Place, Held] = {}
    record_attributes(before, flat.model, [each.place for each in fixed])
    with contextlib.suppress(DynamicOutputShapeException):  # a masked selection has a shape during an export only
        with mode, DependencyRecorder((*flat.parameters(), *flat.buffers(), *call.tensors)) as data:
            flat(*call.tensors)
        kept_tensors = tensors_in(flat.returned.changes.values())
        if kept_tensors and not any(t in data for t in kept_tensors):
            return
    changes = flat.returned.changes
    try:
        with restored_attributes(flat.model, before):
            second = _exported(flat, call)
    except Exception:  # noqa: BLE001  it worked in the first call
        same = False
    else:
        same = _computation(program) == _computation(second)
    if not same:
        named = [
            *changes.items(),
            *((each.names[0], "an object with tensors in it") for each in flat.returned.attribute_outputs),
        ]
        name, change = named[0]
        raise CaptureError(
            f"The forward changes {name} and computes with it, but the program would keep a single value.",
            found=str(change),
            hint=f"keep it as a tensor, self.register_buffer({name.rpartition('.')[2]!r}, torch.tensor(...)), or pass "
            "it as an input.",
        )


def _computation(program: torch.export.ExportedProgram) -> list[Any]:
    """Return everything that a program computes with, as text."""
    nodes = [(str(n.target), str(n.args), str(n.kwargs)) for n in program.graph.nodes]
    return [nodes, [(name, str(t)) for name, t in program.constants.items()]]


def _located(error: CaptureError) -> AutoparError:
    """Add the user's line to one of our own errors that was raised below it."""
    where = user_line(error)
    return CaptureError(f"{error.what[:-1]}: {where}." if where else error.what, found=error.found, hint=error.hint)


def _notices(returned: LastCall, cached: bool, checks: Sequence[str], overridden: Sequence[str]) -> list[str]:
    notices = [
        f"{name} {change.verb} in forward, and keeps its old value outside of it"
        for name, change in returned.changes.items()
        if not attribute_outputs.is_part(name, returned.attribute_outputs)
    ]
    if checks:
        notices.append(f"checks of values are assumed to pass: {', '.join(dict.fromkeys(checks))}")
    if overridden:
        notices.append(
            "torch.utils.checkpoint is overridden: the plan decides what is recomputed, by the memory_budget"
        )
    if cached:
        notices.append("caches for generation (past_key_values) are None in training")
    return notices
