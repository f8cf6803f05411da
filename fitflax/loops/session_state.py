"""The state of a session: initializes, restores and replaces it, and copies it to and from a model that holds its own variables."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from fitflax.checkpoints.checkpoint_files import Saved
from fitflax.checkpoints.restore import RestoreReport, check_mapping, from_saved, match, match_streams, moved, needs_shapes, refit, report_of
from fitflax.checkpoints.resume import INFERENCE_STATE, check_fits, eval_params_of, fit_to, restored_state, warn_of_changes, warn_of_eval_params
from fitflax.data import Position
from fitflax.errors import NotReadyError, RestoreError
from fitflax.loops.configuration import CurrentTask, RestoreOptions, zeros
from fitflax.optimizers import replace_by_path, settable_by_path, with_hyperparams
from fitflax.parallel.placement import RemoteArray, explicitly
from fitflax.state import Batch, InferenceState, TrainState, only_params, parts_of, shapes_in, shapes_of, start_average, state_faults
from fitflax.steps.live_state import LiveState, collect_dropped, strong_types
from fitflax.steps.optimizer import LossScaled, scaled_state
from fitflax.steps.program import check_places
from fitflax.steps.train_step import Task

if TYPE_CHECKING:  # It imports flax.nnx.
    from fitflax.models.nnx_graph import ModuleVariables


@dataclasses.dataclass
class Progress:
    """The progress of a run, counted on the host. A resume needs it, so it is saved as JSON."""

    step: int = 0  # Finished steps.
    epoch: int = 0  # Index of the current or next epoch.
    step_in_epoch: int = 0  # Finished steps of the current epoch.
    epoch_is_open: bool = False  # Whether the epoch has begun and not ended.
    epoch_is_over: bool = False  # Whether the open epoch has had all its batches.
    is_pending: bool = False  # Whether the triggers of the last step have not been evaluated yet.
    position: Position = dataclasses.field(default_factory=Position)  # Position in the data after the last finished step.
    used: tuple[int, ...] = ()  # `position.examples` of each process, if each has its own shard.
    first_step: int = 0  # Step at which this run began; its total is counted from it.

    def begin_pass(self, number: int) -> None:
        """Sets the position to the beginning of a pass over the data."""
        self.position, self.used = Position(number), ()

    def as_json(self) -> dict[str, Any]:
        """Returns all values as a dict that can be written as JSON."""
        # For a resume, an epoch without a step has not begun.
        is_open = self.epoch_is_open and self.step_in_epoch > 0
        values = {**vars(self), "position": self.position._asdict(), "epoch_is_open": is_open, "is_pending": self.is_pending and is_open}
        if not self.used:
            del values["used"]
        return values

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "Progress":
        """Returns the progress that `as_json` was called on."""
        return cls(**{**saved, "position": Position(**saved["position"]), "used": tuple(saved.get("used", ()))})


class SessionState:
    """The state that a trainer holds between calls, and all operations that replace it. `module_variables` are those of an NNX module."""

    def __init__(self, task: CurrentTask, seed: int, module_variables: "ModuleVariables | None", members: int | None) -> None:
        self._task, self._strategy, self._seed, self.module_variables, self._members = task, task.strategy, seed, module_variables, members
        self.live: LiveState | None = None
        self.sample: Batch | None = None  # Shapes of the first batch of the last call.
        self.hyperparams: Mapping[str, Any] = {}  # Hyperparameters of a new state.
        self.last_progress: Progress | None = None  # Progress of the last run, for its position in the data.
        self.is_serving = False  # Whether there is no optimizer state because the state is from an `InferenceState`.
        self._is_synced = False  # Whether a block of `synced_with_model` is running.
        self._written_version: tuple[LiveState, int] | None = None  # The live state and its version that were last written to the model.
        self._pending: Saved | None = None  # A checkpoint whose optimizer state is restored once compile() gives an optimizer.
        self._casts = False  # Whether that restore converts floating dtypes once the module's are known.
        self._unchecked_source: str | None = None  # The source of a state that was restored before the module's shapes were known.
        self.checked_versions: tuple[int, int] | None = None  # Versions of the live state before and after that check.
        self._built_from: Batch | None = None  # Shapes of a batch that the state is known to fit.

    @property
    def _functions(self) -> Task:
        return self._task.any_program().task

    @property
    def key(self) -> jax.Array:
        """The random key; for an ensemble one for each member, `[members]`."""
        with explicitly():
            keys = [jax.random.key(self._seed + member) for member in range(self._members or 1)]
            return keys[0] if self._members is None else jnp.stack(keys)

    def need(self, what: str, *, evaluates: bool = False) -> LiveState:
        """Returns the live state; raises `NotReadyError` if there is none.

        With `evaluates`, warns if the parameters for evaluation are not known, because a checkpoint was restored before `compile`.
        """
        if self.live is None:
            raise NotReadyError(f"{what}: there is no state yet. Call build(batch), fit(...) or restore(path) first.")
        if evaluates and self._pending is not None:
            warn_of_eval_params(self._pending)
        return self.live

    def state_to_save(self) -> TrainState:
        """Returns the live state. Before `compile`, the optimizer state in process 0, which saves it, is that of the restored checkpoint, as nested dicts."""
        state, saved = self.need("save").borrow(), self._pending
        if saved is None or jax.process_index():
            return state
        forms = {"key_impls": saved.metadata["key_impls"], "integer_keys": saved.metadata.get("integer_keys", ())}
        opt_state = from_saved(saved.train["opt_state"], root="train/opt_state", **forms)
        return dataclasses.replace(state, opt_state=jax.tree.map(lambda leaf: np.asarray(leaf) if isinstance(leaf, RemoteArray) else leaf, opt_state))

    def eval_params_name(self) -> str | None:
        """Returns the name of the function that computes the parameters for evaluation from the optimizer state, which may not be restored yet."""
        if self._pending is not None:
            return eval_params_of(self._pending)
        return self._task.any_program().eval_params.name_of(self.need("save").borrow())

    # -- matching what `compile` configures --

    def match_task(self, *, is_new_optimizer: bool) -> None:
        """Adapts the state to a newly compiled task. Discards the task if this fails after the optimizer state was replaced."""
        live, pending = self.live, self._pending
        if live is None or self.is_serving:
            return
        before = live.version
        try:
            if pending is not None:
                self._restore_optimizer(pending)
            elif is_new_optimizer:
                self._init_optimizer()
            self._match_numerics()
        except BaseException:
            self._pending = pending
            if live.version != before:
                if pending is not None:
                    self._update(dataclasses.replace(live.borrow(), opt_state=()))  # As before, so that the next compile() does not hold two of them.
                self._task.discard()  # The next compile() restores or initializes the optimizer state again.
            raise

    def _restore_optimizer(self, saved: Saved) -> None:
        """Restores the optimizer state of a checkpoint that was restored before there was an optimizer."""
        self._check_scale(saved)
        state = self.need("compile").borrow()
        target = jax.eval_shape(self._functions.init_optimizer, state.params)
        fitted = fit_to(target, saved.train["opt_state"], saved, "train/opt_state", cast=self._casts)
        opt_state = self._strategy.put_at(fitted, self._place_optimizer(state, target))
        state = with_hyperparams(dataclasses.replace(state, opt_state=opt_state), self.hyperparams)
        warn_of_changes(saved, self._task.described, to_resume=False)
        if self._task.any_program().eval_params.function_of(state) is None:
            warn_of_eval_params(saved)
        self._pending = None
        self._update(state)

    def _init_optimizer(self, kept: Mapping[Any, Any] | None = None) -> None:
        """Initializes the optimizer state. `kept` are values of hyperparameters by path; by default, those of a new state."""
        strategy, init, state = self._strategy, self._functions.init_optimizer, self.need("compile").borrow()
        # Errors are raised before anything is released.
        shapes = self._check_optimizer(state, self.hyperparams if kept is None else {})
        places = strategy.places(self._place_optimizer(state, shapes))
        # Copied, because an optimizer may keep the parameters themselves, and a step can donate a buffer only once.
        fresh = strategy.compile(lambda params: jax.tree.map(jnp.copy, init(params)), inputs=(strategy.places(state.params),), outputs=places)
        state = dataclasses.replace(state, opt_state=())
        self._update(state)  # Both optimizer states may not fit on the devices together.
        try:
            state = dataclasses.replace(state, opt_state=fresh(state.params))
            if kept is None:
                state = with_hyperparams(state, self.hyperparams)
            else:
                state = dataclasses.replace(state, opt_state=replace_by_path(state.opt_state, kept))
        except BaseException:
            self._task.discard()  # So that the next compile() initializes it again.
            raise
        self._update(state)

    def _place_optimizer(self, state: TrainState, shapes: Any) -> Any:
        """Returns the shapes of an optimizer state with their shardings."""
        return self._strategy.abstract_state(only_params(state, opt_state=shapes)).opt_state

    def _update(self, state: TrainState) -> None:
        """Replaces the live state of the same step."""
        live = self.need("compile")
        live.replace(state, live.step)

    def _match_numerics(self) -> None:
        """Adds or removes the loss scale and the averaged parameters, as the compiled task requires."""
        live = self.live
        if live is None or self._task.optimizer is None or not live.is_intact:
            return
        numerics, state = self._task.numerics, live.borrow()
        is_scaled = isinstance(state.opt_state, LossScaled)
        if is_scaled and not numerics.is_scaled:
            state = dataclasses.replace(state, opt_state=state.opt_state.inner_state)
        elif numerics.is_scaled and not is_scaled:
            scaled = self._strategy.put(self._functions.map_members(lambda key: scaled_state(()))(state.key))
            state = dataclasses.replace(state, opt_state=scaled._replace(inner_state=state.opt_state))
        if (numerics.ema_decay is None) != (state.ema_params is None):
            places = self._strategy.places(state.params)
            start = self._strategy.compile(start_average, inputs=(places,), outputs=places)
            state = dataclasses.replace(state, ema_params=start(state.params) if state.ema_params is None else None)
        if state is not live.borrow():
            self._update(state)

    # -- initialization --

    def begin_build(self, batch: Batch) -> TrainState:
        """Returns the shapes of the state that `build` creates. Begins to compile the initialization, unless the model holds its variables."""
        initial = self._task.need_compiled("build").initial_state
        return initial.begin(self.key, batch) if self.module_variables is None else initial.shapes(self.key, batch)

    def build(self, batch: Batch) -> None:
        """Initializes the state from the shapes of a batch."""
        self.sample = shapes_of(batch)
        program, key = self._task.need_compiled("build"), self.key
        if self.module_variables is not None:
            self._start_from(self.module_variables.read())
            return
        if not program.is_eager:  # Without jit, shapes are known only after initialization.
            check_places(program, program.initial_state.shapes(key, batch))
        with self._live_released():
            state = with_hyperparams(program.initial_state.init(key, batch), self.hyperparams)
        self.live = LiveState(self._strategy, state, 0)
        self._built_from = self.sample
        self._note_initialized()

    def _note_initialized(self) -> None:
        self.last_progress = self._pending = self._unchecked_source = None
        self.is_serving = False

    def copy_from(self, other: "SessionState") -> None:
        """Copies another state."""
        if other.live is None:
            return
        names = ("_built_from", "_unchecked_source", "_casts", "_pending", "is_serving", "sample")
        vars(self).update({name: getattr(other, name) for name in names})
        self.live = LiveState(self._strategy, self._strategy.copy(other.live.borrow()), other.live.step)

    def take_member(self, ensemble: "SessionState", member: TrainState) -> None:
        """Takes the state of a member of an ensemble."""
        vars(self).update({name: getattr(ensemble, name) for name in ("_unchecked_source", "_casts", "is_serving")})
        self.live = LiveState(self._strategy, self._strategy.put(member), ensemble.need("select").step)

    # -- models that hold their variables --

    @contextlib.contextmanager
    def synced_with_model(self, *, builds_state: bool = False) -> Iterator[None]:
        """Reads the model's own variables before a block that may change the state, and writes them after it, even if it raises.

        If the block `builds_state`, a missing state is left to it.
        """
        if self.module_variables is None or self._is_synced:
            yield
            return
        if self.live is not None or not builds_state:
            self.read_model()
        self._is_synced = True
        try:
            yield
        finally:
            self._is_synced = False
            self.write_model()

    def read_model(self) -> None:
        """Reads the model's own variables if they have changed since `write_model`."""
        changed = None if self.module_variables is None else self.module_variables.read_changed()
        if changed is None:
            return
        if self.live is None or not self.live.is_intact:
            self._start_from(changed)
            return
        state, (params, model_state) = self.live.borrow(), parts_of(changed)
        places = self._strategy.abstract_state(only_params(state, params=params, model_state=model_state, axes=state.axes))
        params, model_state = strong_types(self._strategy.put_at((params, model_state), (places.params, places.model_state)))
        averages = state.ema_params
        if averages is not None:
            inputs = tuple(map(self._strategy.places, (averages, state.params, params)))
            averages = self._strategy.compile(_restart_changed, inputs=inputs, outputs=inputs[0])(averages, state.params, params)
        self._update(dataclasses.replace(state, params=params, model_state=model_state, ema_params=averages))

    def write_model(self) -> None:
        """Writes copies of the live state's variables to a model that holds its variables; steps do not reuse their buffers."""
        live = self.live
        if self.module_variables is None or live is None or not live.is_intact or self._written_version == (live, live.version):
            return
        state = live.borrow()
        self.module_variables.write(self._strategy.copy_apart({"params": state.params, **state.model_state}))
        self._written_version = live, live.version

    def _start_from(self, variables: dict[str, Any]) -> None:
        """Creates a state at step 0 from the model's own variables."""
        assert self.module_variables is not None
        params, model_state = parts_of(variables)
        state = TrainState(step=np.int32(0), params=params, model_state=model_state, opt_state=(), key=self.key, axes=self.module_variables.axes)  # type: ignore[arg-type]
        if self._task.program is not None and not self._task.program.is_eager:
            check_places(self._task.program, self._strategy.abstract_state(state))
        if self._task.optimizer is not None:
            self._check_optimizer(state, self.hyperparams)
        live = self._replace_live(state)
        live.replace(strong_types(live.borrow()), 0)
        self._note_initialized()
        if self._task.optimizer is not None:
            self._init_optimizer()
            self._match_numerics()

    # -- restoring --

    def restore(self, saved: Saved, batch: Batch | None, options: RestoreOptions) -> RestoreReport:
        """Replaces the live state with a saved one; the two are never on the devices together. If it does not fit, nothing changes.

        The expected structure is that of the live state or of a batch. Without either, the structure of the file is used, and the first batch shows
        whether it fits.
        """
        names, has_optimizer = check_mapping(options.mapping, partial=options.partial), self._task.optimizer is not None
        saved = dataclasses.replace(saved, train=self._without_transient(saved.train))
        target = self._expected_shapes(batch)
        if options.partial:
            if target is None or (self._built_from is None and self.module_variables is None):
                raise NotReadyError(needs_shapes(saved))
            parts, report = match(saved, target, names, cast=options.cast)
            restored = TrainState(step=np.int32(0), key=self.key, opt_state=(), **parts)  # type: ignore[arg-type]
        else:
            if not options.weights_only and has_optimizer:
                self._check_scale(saved)
            saved, unused = (saved, []) if options.is_resume else match_streams(saved, target, is_nnx=self.module_variables is not None)
            saved, target = self._with_averages(moved(saved, target, names), target)
            restored = self._restore_all(saved, target, options)
            report = report_of(restored, unused)
        if options.starts_over and has_optimizer:
            self._check_optimizer(restored, self.hyperparams)
        if target is not None:
            restored = dataclasses.replace(restored, axes=target.axes)
        self._replace_live(restored)
        self.is_serving = False
        if batch is not None:
            self._built_from = shapes_of(batch)
        self._unchecked_source, self._casts = (str(saved.path) if target is None else None), options.cast
        self._pending = None
        if not options.starts_over and not has_optimizer:
            self._pending = dataclasses.replace(saved, train={"opt_state": saved.train["opt_state"]}, run={})
        if options.starts_over and has_optimizer:
            self._init_optimizer()
        self._match_numerics()
        return report

    def _restore_all(self, saved: Saved, target: TrainState | None, options: RestoreOptions) -> TrainState:
        """Returns the state of a checkpoint of this model, on the host."""
        optimizer = self._task.optimizer and self._task.optimizer._replace(init=self._functions.init_optimizer)
        restored = restored_state(saved, target=target, optimizer=optimizer, key=self.key, weights_only=options.weights_only, cast=options.cast)
        if options.weights_only and saved.train["ema_params"] is not None:
            averages = jax.eval_shape(start_average, restored.params)
            restored = dataclasses.replace(restored, ema_params=fit_to(averages, saved.train["ema_params"], saved, "train/ema_params", cast=options.cast))
        return restored

    def _check_optimizer(self, state: TrainState, hyperparams: Mapping[str, Any]) -> Any:
        """Returns the shapes of a new optimizer state; raises errors about parameters and hyperparameters, before anything changes."""
        shapes = jax.eval_shape(self._functions.init_optimizer, shapes_in(state.params))
        with_hyperparams(dataclasses.replace(state, opt_state=shapes), hyperparams)
        return shapes

    def _without_transient(self, parts: dict[str, Any]) -> dict[str, Any]:
        """Returns parts of a saved state without collections that are not part of this trainer's state, such as the perturbations in older checkpoints."""
        collections, transient = parts.get("model_state"), self._functions.transient
        if not isinstance(collections, dict):
            return parts
        return {**parts, "model_state": {name: tree for name, tree in collections.items() if name not in transient}}

    def _check_scale(self, saved: Saved) -> None:
        """Raises `RestoreError` if only one of the checkpoint and the compiled task has a loss scale."""
        opt_state = saved.train.get("opt_state", {})
        has_scale = isinstance(opt_state, dict) and set(opt_state) == set(LossScaled._fields)
        if "opt_state" in saved.train and has_scale != self._task.numerics.is_scaled:
            saved_with, compiled_with = ("with", "without") if has_scale else ("without", "with")
            raise RestoreError(
                f"{saved.path} was saved {saved_with} precision='float16', but the trainer is compiled {compiled_with} it. "
                "Compile with the checkpoint's precision, or restore with weights_only=True."
            )

    def _with_averages(self, saved: Saved, target: TrainState | None) -> tuple[Saved, TrainState | None]:
        """Returns the checkpoint and the expected state, with averaged parameters if the checkpoint has them and the compiled task, if any, uses them."""
        averages = saved.train.get("ema_params")
        if self._task.optimizer is not None and self._task.numerics.ema_decay is None:
            averages = None
        if target is not None:
            target = dataclasses.replace(target, ema_params=None if averages is None else jax.eval_shape(start_average, target.params))
        return dataclasses.replace(saved, train={**saved.train, "ema_params": averages}), target

    def _expected_shapes(self, batch: Batch | None) -> TrainState | None:
        is_own = not self.is_serving or self._built_from is None  # The dtypes of served averages may differ from the module's.
        if is_own and self.live is not None and self.live.is_intact and self._unchecked_source is None:
            shapes = cast(TrainState, shapes_in(self.live.borrow()))
            if self.is_serving and self._task.optimizer:
                shapes = dataclasses.replace(shapes, opt_state=jax.eval_shape(self._functions.init_optimizer, shapes.params))
            return shapes
        known = self._built_from if batch is None else batch
        return None if known is None else self._task.any_program().initial_state.shapes(self.key, known)

    def _replace_live(self, restored: TrainState) -> LiveState:
        """Replaces the live state, and returns it; leaves that are only shapes are initialized."""
        live, step = self.live, int(restored.step)
        leaves, treedef = jax.tree.flatten(restored)
        missing = [index for index, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)]
        with self._live_released():
            initialized = self._initialize(missing, restored) if missing else []  # First, because it needs memory for the whole state.
            restored_leaves = jax.tree.unflatten(treedef, [None if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves])
            placed = iter(jax.tree.leaves(self._strategy.put_state(restored_leaves)))
            new = iter(initialized)
            state = jax.tree.unflatten(treedef, [next(new if isinstance(leaf, jax.ShapeDtypeStruct) else placed) for leaf in leaves])
        if live is None:
            self.live = live = LiveState(self._strategy, state, step)
        else:
            live.replace(state, step)
        return live

    def _initialize(self, indices: list[int], state: TrainState) -> list[Any]:
        """Returns the leaves of the state at step 0 with these indices, in a state without an optimizer state. Only these leaves stay in memory."""
        if self.module_variables is not None:
            params, model_state = parts_of(self.module_variables.read())
            leaves = jax.tree.leaves(dataclasses.replace(state, params=params, model_state=model_state))
            placed = jax.tree.leaves(self._strategy.abstract_state(state))
            return cast(list[Any], self._strategy.put_at([leaves[index] for index in indices], [placed[index] for index in indices]))
        assert self._built_from is not None
        fresh = self._task.any_program().initial_state.init(self.key, zeros(self._built_from))
        leaves = jax.tree.leaves(dataclasses.replace(fresh, opt_state=()))
        return [leaves[index] for index in indices]

    @contextlib.contextmanager
    def _live_released(self) -> Iterator[None]:
        """Releases the live state for a block that creates another one, because both may not fit on the devices.

        Lent arrays stay valid. If the block fails, there is no state instead of a part of one.
        """
        if self.live is not None:
            self.live.release()
        collect_dropped(self.live)
        try:
            yield
        except BaseException:
            self.live = None
            raise

    def check_batch(self, batch: Batch) -> None:
        """Records a batch's shapes. Checks a state that was restored before the module's shapes were known, and gives it the module's containers."""
        self.sample = shapes_of(batch)
        if self._unchecked_source is None:
            return
        live = self.need("restore")
        before = live.version
        target = self._task.any_program().initial_state.shapes(self.key, batch)
        if self.is_serving:
            target = self._to_serve(target, live.borrow().params)
        state = check_fits(target, live.borrow(), self._unchecked_source, cast=self._casts)
        if state.ema_params is not None:
            shapes = jax.eval_shape(start_average, state.params)
            averages = refit(shapes, state.ema_params, where=self._unchecked_source, root="train/ema_params", cast=self._casts)
            state = dataclasses.replace(state, ema_params=averages)
        placed, treedef = self._strategy.abstract_state(state), jax.tree.structure(state)
        is_in_place = self._strategy.places(state) == self._strategy.places(placed)
        live.replace(state, live.step)
        if not is_in_place:
            leaves = jax.tree.leaves(live.take().state())  # Copied if the old one is lent.
            del state
            with self._live_released():
                moved = jax.tree.unflatten(treedef, self._strategy.move(leaves, jax.tree.leaves(placed)))
            live.replace(moved, int(moved.step))
        self._built_from, self._unchecked_source = self.sample, None
        self.checked_versions = before, live.version

    # -- other states --

    def state_or_shapes(self, batch: Batch) -> TrainState:
        """Returns the live state if it is known to fit the module, else the shapes that would be initialized from such a batch."""
        if self.live is not None and self._unchecked_source is None:  # A restored state that was not checked may still change its containers.
            return self.live.borrow()
        return self._task.any_program().initial_state.shapes(self.key, batch)

    def serve(self, state: InferenceState) -> None:
        """Replaces the live state with a state without an optimizer; raises `RestoreError` if it does not fit the module."""
        target = self._expected_shapes(None)
        parts = self._without_transient({"params": state.params, "model_state": state.model_state})
        train_state = TrainState(step=np.int32(state.step), opt_state=(), key=self.key, **parts)  # type: ignore[arg-type]
        if target is not None:
            train_state = check_fits(self._to_serve(target, train_state.params), train_state, INFERENCE_STATE)
        self._replace_live(train_state)
        self._unchecked_source, self._casts = (INFERENCE_STATE if target is None else None), False
        self._pending, self.is_serving = None, True

    def _to_serve(self, target: TrainState, params: Any) -> TrainState:
        """Returns the shapes that an `InferenceState` with these parameters must have.

        The parameters may be averages, which are wider than half precision. Those of NNX may not, because they are written to the user's module.
        """
        expected = target.params
        if self.module_variables is None:
            averages = jax.eval_shape(start_average, expected)
            dtypes, wide = ({getattr(leaf, "dtype", None) for leaf in jax.tree.leaves(tree)} for tree in (params, averages))
            expected = averages if dtypes <= wide else expected
        return dataclasses.replace(target, params=expected, opt_state=(), ema_params=None)

    def replace_params(self, params: Any) -> None:
        """Replaces the parameters; averages and the optimizer state start over, but hyperparameters keep their values."""
        state = self.need("replace_params").borrow().replace_params(params)
        is_trainable = self._task.optimizer is not None and not self.is_serving
        if is_trainable:
            self._check_optimizer(state, {})
        self.replace(state)
        self._pending = None
        if is_trainable:
            self._init_optimizer(settable_by_path(state.opt_state))

    def replace(self, state: TrainState) -> None:
        """Replaces the live state with a copy of another one; raises `RestoreError` if its structure, shapes or dtypes differ."""
        live = self.need("replace_state")
        now = live.borrow()
        faults = state_faults(now, state)
        if faults:
            hint = "" if hasattr(state.step, "dtype") else " Change the step with state.replace_step(step)."
            raise RestoreError(f"replace_state takes a state with the structure, shapes and dtypes of this trainer's state. Differences: {faults}.{hint}")
        state = jax.tree.unflatten(jax.tree.structure(now), jax.tree.leaves(state))
        live.replace(self._strategy.put_state(state), int(state.step))


def _restart_changed(averages: Any, before: Any, after: Any) -> Any:
    """Returns averages that start over from the parameters that have changed."""

    def one(average: jax.Array, old: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
        return jnp.where(jnp.array_equal(old, new), average, start)

    return jax.tree.map(one, averages, before, after, start_average(after))
