"""Every mistake a user can make has a class here: the rule, the values at hand, what to change."""

from __future__ import annotations

from typing import Any


class SmparError(RuntimeError):
    """Base of all errors that smpar raises on purpose.

    Args:
        rule: what must hold.
        values: what was found instead, with the numbers or names at hand.
        fix: what to change; ends in code to paste where that is possible.
    """

    def __init__(self, rule: str, values: str, fix: str) -> None:
        super().__init__(f"{rule}\n  found: {values}\n  to fix: {fix}")
        self.rule, self.values, self.fix = rule, values, fix

    def __reduce__(self) -> tuple[type[SmparError], tuple[str, str, str], dict[str, Any]]:
        return type(self), (self.rule, self.values, self.fix), self.__dict__.copy()


class ProgramError(SmparError):
    """A pipeline program contradicts itself: a flow names no segment, or runs against program order."""


class ScheduleError(SmparError):
    """A schedule cannot run its program: an action is missing, doubled, misplaced, or waits for ever."""


class ScheduleNameError(SmparError):
    """No schedule has the name that was asked for."""


class PlanError(SmparError):
    """No plan keeps the limits given, or the numbers given to the planner mean nothing."""


class TooFewUnits(PlanError):
    """More pipeline stages are asked for than there are units to put on them."""


class ProfileError(PlanError):
    """A profile of a model contradicts itself, or lacks what a plan needs."""


class PlanFileError(PlanError):
    """A plan file cannot be read, or is of another model, batch or world."""


class ClusterError(PlanError):
    """A description of a cluster contradicts itself, lacks a number, or names something unknown."""


class EmulationError(PlanError):
    """The numbers of an emulation contradict each other, or mean nothing."""


class EmulationFailed(SmparError):
    """A process of an emulation failed, so all were ended."""


class NothingFits(PlanError):
    """No cuts keep the memory limits; the best-fitting ones need ``nbytes`` too many at stage or rank ``at``."""

    def __init__(self, rule: str, values: str, fix: str, at: int = 0, nbytes: float = 0.0) -> None:
        super().__init__(rule, values, fix)
        self.at, self.nbytes = at, nbytes


class NativeMissing(SmparError):
    """The planner's compiled core is not there."""


class ConfigError(SmparError):
    """A key of ``smpar.init``'s configuration is unknown, of a wrong type, or out of range."""


class NotBuiltYet(ConfigError):
    """A key asks for something that this version does not do; refused rather than ignored."""


class MeshError(SmparError):
    """The world's size and the parallel degrees do not fit together, or a rank is outside the world."""


class NotInitialized(SmparError):
    """Something needs ``smpar.init`` to have run."""


class CommError(SmparError):
    """A transfer could not be done: a connection broke, or a message's address makes no sense."""


class PeerFailed(SmparError):
    """Another rank failed, so this one stops too.

    Attributes:
        rank: global rank of the first rank that failed; -1 if it could not be told.
        trace: that rank's traceback; empty if it died without leaving one.
    """

    def __init__(self, rule: str, values: str, fix: str, rank: int = -1, trace: str = "") -> None:
        super().__init__(rule, values, fix)
        self.rank, self.trace = rank, trace


class StepError(SmparError):
    """Something in a step goes against its rules; the rule and the fix belong to the class."""

    RULE = "a step keeps to its rules"
    FIX = "see the documentation of smpar.step"
    FOUND = "{}"  # how several values are put in words

    def __init__(self, *values: object) -> None:
        super().__init__(self.RULE, self.FOUND.format(*values) if len(values) > 1 else str(values[0]), self.FIX)

    def __reduce__(self) -> tuple[type[SmparError], tuple[str], dict[str, Any]]:  # type: ignore[override]
        return type(self), (self.values,), self.__dict__.copy()


class BypassedGlue(StepError):
    """An operation outside of any unit took a stage tensor past smpar's sight."""

    RULE = "outside of modules, stage tensors may only be used by functions and methods of torch"
    FIX = "put the call (a scripted function, or a C++ extension) into the forward of an nn.Module of its own"


class OutsideStep(StepError):
    """A stage tensor is used where no step is running in glue."""

    RULE = "a stage tensor lives in the step that made it, and reaches a module only through its arguments"
    FIX = "return the tensor from the step, or pass it to the module as an argument (in a tuple, dict or dataclass)"


class NotInGlue(StepError):
    """A function that stage tensors do not support outside of modules."""

    RULE = "outside of modules this cannot be done with a stage tensor"
    FOUND = "{} ({})"
    FIX = "follow the advice above, or move the code into the forward of an nn.Module of its own"


class WriteIntoReplicated(StepError):
    """A stage tensor was written into a parameter, a buffer, or a plain tensor that glue did not make in this call.

    ``shareable``: no gradient goes that way, so the written value can be sent to all stages, at the price of a
    program that is not known beforehand.
    """

    shareable = False

    RULE = "outside of modules, a plain tensor or a parameter cannot be written with a stage tensor's data"
    FIX = "make the target from a stage tensor (h.new_zeros(...), torch.zeros_like(h)), or use an nn.Module of its own"


class BlindView(StepError):
    """A view that cannot know of the gradient that its memory has got since is used where gradients matter."""

    RULE = (
        "a view made under torch.no_grad(), or before requires_grad_() of what it views, is not used with gradients "
        "enabled once its memory has a gradient"
    )
    FOUND = "{} uses such a view"
    FIX = "make the view afterwards, with gradients enabled; or clone it before; or use it under torch.no_grad()"


class HiddenTensor(StepError):
    """A tensor that a module left in an object is used outside of that module."""

    RULE = "what a module leaves in an object among its arguments is on that module's stage only"
    FIX = "return the tensor, or make the object's class a dataclass, a dict or a list"


class NotThroughModel(StepError):
    """``model.backward`` of a tensor that does not depend on the model's parameters."""

    RULE = "model.backward(loss) needs a loss computed from the model's outputs that requires gradients"
    FIX = "check for .detach(), torch.no_grad() and frozen parameters between the model and the loss"


class NestedStep(StepError):
    """A step function is called from within another one."""

    RULE = "a function decorated with @smpar.step is not called inside another one"
    FIX = "take the decorator off the inner function; only the function that your training loop calls has it"


class NoSuchArgument(StepError):
    """``smpar.step`` names an argument that the step function does not have."""

    RULE = "non_split_inputs and input_split_axes name arguments of the step function"
    FIX = '@smpar.step(non_split_inputs=["mask"], input_split_axes={"x": 1})\n  def train_step(model, x, mask): ...'


class WrongBackward(StepError):
    """Backward of a tensor with several elements, without their gradients."""

    RULE = "model.backward(tensor) without grad_tensors needs a tensor of one element"
    FIX = "model.backward(tensor.mean()), or model.backward(tensor, grad_tensors=g)"


class OutsideOfStep(StepError):
    """The model or its backward is called outside of a step."""

    RULE = "model(...) and model.backward(loss) are called inside a function decorated with @smpar.step"
    FIX = "@smpar.step\n  def train_step(model, x, y): ... model.backward(loss); return loss"


class LeftProgram(StepError):
    """The step function did something else than when it was traced with inputs of the same shapes."""

    RULE = "with inputs of the same shapes, a step function runs the same modules and operations each time"
    FIX = 'smpar.init({"static_mode": False, ...}) if the model decides by chance or by state what it runs'


class UnitMismatch(StepError):
    """A unit's real result differs from what tracing it under fake tensors gave."""

    RULE = "the number, shapes and types of a module's results are those that tracing found"
    FOUND = "{0} gave {2}, where its trace has {1}"
    FIX = (
        'smpar.init({"static_mode": False, ...}) if they depend on data; else keep the module whole with its parent, '
        "or make them depend on shapes only"
    )


class GradientSurprise(StepError):
    """A gradient appeared where tracing saw no way for it."""

    RULE = "gradients flow between stages where tracing saw them flow"
    FIX = 'smpar.init({"static_mode": False, ...}), or keep the module whole: smpar.set_partition(module, stage)'


class FactorWritten(StepError):
    """A tensor that the gradient of a weight is made of was written between the two parts of a split backward."""

    RULE = "what a forward saved, and gradients, are not written in place before all gradients are made of them"
    FIX = "clone it before the write, or take a schedule with whole backwards: smpar.init({'pipeline': '1f1b', ...})"


class BatchError(StepError):
    """The batch cannot be split into microbatches."""

    RULE = "each tensor among the step's arguments is split into `microbatches` parts along its batch axis"
    FIX = (
        'smpar.step(non_split_inputs=["name"], input_split_axes={"name": axis}), fewer microbatches, or a larger batch'
    )


class RanksDisagree(StepError):
    """The ranks of one pipeline or tensor-parallel group called different steps, or with unfitting inputs."""

    RULE = (
        "all ranks of a pipeline or tensor-parallel group call the same step functions in the same order, and those "
        "of a pipeline with the same batches"
    )
    FIX = "shard the data by smpar.dp_rank() of smpar.dp_size(), never by smpar.rank(); call each step on every rank"


class BatchesDisagree(RanksDisagree):
    """Ranks of one tensor-parallel group got different batches, though ``prescaled_batch`` is set."""

    RULE = "with prescaled_batch = True, all ranks of a tensor-parallel group get the same batch"
    FIX = (
        "shard the data by smpar.rdp_rank() of smpar.rdp_size(), which are equal on these ranks; or leave out "
        "'prescaled_batch', where each rank gets a batch of its own (by smpar.dp_rank() of smpar.dp_size())"
    )


class ShapesDisagree(RanksDisagree):
    """Ranks of one tensor-parallel group got batches of different shapes, or unlike other arguments."""

    RULE = "the batches of a tensor-parallel group's ranks have equal shapes, and other arguments of a step are equal"
    FIX = "pad the batches, or leave samples out; pass what differs from rank to rank in a tensor"


class ProgramsDisagree(RanksDisagree):
    """Ranks of one pipeline or tensor-parallel group would run different modules or operations, or in other modes."""

    RULE = (
        "all ranks of a pipeline or tensor-parallel group run the same modules and operations in a step, in the same "
        "modes"
    )
    FIX = (
        "call train(), eval(), requires_grad_() and autocast alike on all ranks; let nothing in the model's forward or "
        "in the step depend on smpar.rank(), smpar.pp_rank() or smpar.tp_rank()"
    )


class PartitionError(StepError):
    """The partition asked for does not fit the model or the number of stages."""

    RULE = "every stage exists and has something to run"
    FIX = "use stages 0 to pipeline_parallel_degree - 1 in smpar.partition and smpar.set_partition"


class ModelError(StepError):
    """smpar.DistributedModel or DistributedOptimizer is used against its rules."""

    RULE = "one DistributedModel is trained at a time, by optimizers made over its parameters"
    FIX = "model = smpar.DistributedModel(module); optimizer = smpar.DistributedOptimizer(optimizer)"


class OtherSlice(StepError):
    """A partial state is loaded where the slices are others."""

    RULE = "a partial state is loaded by the same rank of a tensor-parallel group of the same size as it was made on"
    FOUND = "the state of rank {} of {}, loaded by rank {} of {}"
    FIX = "save and load whole states: state_dict() of all ranks together instead of local_state_dict()"


class LateGradient(StepError):
    """A parameter got another gradient after its reduction over the replicas had begun."""

    RULE = (
        "reductions overlap backward only where each step of a function gives parameters as many gradients as its first"
    )
    FIX = "smpar.DistributedModel(module, overlapping_allreduce=False)"


class WrongHookResult(StepError):
    """A communication hook does not return what it is asked for."""

    RULE = "a communication hook returns a future of the bucket's averages, flat"
    FIX = "end the hook with: future = torch.futures.Future(); future.set_result(averages); return future"


class CommHookError(StepError):
    """A communication hook is registered where none can be."""

    RULE = "one communication hook is registered, outside of steps"
    FIX = "model.register_comm_hook(state, hook) once, right after smpar.DistributedModel(...)"


class JoinError(StepError):
    """``model.join()`` is used where it cannot work."""

    RULE = "model.join() surrounds the whole training loop, once, on every rank, each with a batch or more of its own"
    FIX = "with model.join():\n      for x, y in batches: train_step(model, x, y); optimizer.step()"


class EndedEarly(StepError):
    """A replica ran out of batches, and ``throw_on_early_termination`` was asked for."""

    RULE = "with throw_on_early_termination=True, all replicas stop when the first has no more batches"
    FIX = "catch smpar.errors.EndedEarly around model.join(...), or leave out throw_on_early_termination"


class NothingRan(StepError):
    """Something asks what the last step did, and there was none."""

    RULE = "smpar.timetable() shows the schedule of the last step"
    FIX = "call it after the first step"


class OtherMicrobatch(StepError):
    """A stage tensor was kept and used by another microbatch or step."""

    RULE = "a stage tensor is used by the microbatch that made it, and by no other"
    FIX = "return the tensor from the step and pass it to the next step as an argument; keep no tensor in an attribute"


class LayerArgumentError(SmparError):
    """A layer of smpar.nn is made with an argument that it does not have, or with a value that means nothing to it."""

    def __init__(self, layer: str, found: str, allowed: str | None) -> None:
        fix = f"use {allowed}" if allowed else "see the arguments in smpar.nn.layers.options.Options"
        super().__init__(f"smpar.nn.{layer} is made with its documented arguments", found, fix)


class UnknownWord(StepError, IndexError):
    """An id, or a target, is outside of a vocabulary that is divided among ranks."""

    RULE = "ids and targets are among the words of the vocabulary, from 0 on"
    FOUND = "{} for {}, among {} words"
    FIX = "make the vocabulary as large as the tokenizer's; mark a target to leave out by ignore_index, such as -100"


class MarkedTooLate(StepError):
    """Tensor parallelism is asked for when the model has been divided already."""

    RULE = "tensor parallelism is asked for before smpar.DistributedModel divides the model"
    FIX = "smpar.set_tensor_parallelism(module); model = smpar.DistributedModel(module)"


class RegistrationError(StepError):
    """A class is registered with something that cannot take its place."""

    RULE = "a class of modules is registered with another class of modules, and with hooks that can be called"
    FIX = "@smpar.tp_register(DividedLayer, init_hook=..., forward_hook=..., return_hook=...) on a class of nn.Module"


class HookMismatch(StepError):
    """A hook of a registered class takes or gives other arguments than the class and its twin have."""

    RULE = "the hooks of a registered class translate its arguments to those of its divided twin, and the result back"
    FIX = (
        "init_hook(*args, **kwargs) and forward_hook(*args, **kwargs) take what the registered class takes and return "
        "(args, kwargs) for the twin (init_hook may return None: leave it whole); return_hook(result) translates back"
    )


class OtherDtype(StepError):
    """Modules of different dtypes would be divided as one."""

    RULE = "what is divided together, and the twin that takes a module's place, have one dtype"
    FIX = "make the model in one dtype, smpar.model_creation(tensor_parallelism=True, dtype=...), or module.to(dtype)"


class TwinWeights(StepError):
    """The weights that a registered translation gives do not fit the twin."""

    RULE = "weights(state) of a registered class gives the whole state of its twin, by the twin's names"
    FIX = "smpar.tp_register(..., weights=function from the module's state_dict() to that of its twin)"


class ModelsDiffer(RanksDisagree):
    """Ranks made different models, or asked for different parts of them to be divided."""

    RULE = "all ranks make the same model, and ask for the same modules of it to be divided"
    FIX = "let nothing in the model's creation depend on smpar.rank(), but for its weights, which may differ"


class CommandError(SmparError):
    """A command of ``smpar`` got an argument that it cannot use."""
