"""Faults of the modules, of the models made of them, and of what is sent between ranks."""

from __future__ import annotations

from .fault import Fault

MODULES = {
    "a window whose newer part stays when it becomes the older part": Fault(
        "cmab_kernels/window.py",
        "return _Queue(front, len(front), [], 0, None)",
        "return _Queue(front, len(front), [], 0, self.total)",
        "tests/test_window.py::test_a_window_equals_the_merge_of_the_newest",
    ),
    "a window that lets the oldest go before a merge fails": Fault(
        "cmab_kernels/window.py",
        "        total = state if total is None else _partial(total, state)\n",
        "        del front[older - full :]\n        total = state if total is None else _partial(total, state)\n",
        "tests/test_window.py::test_a_failing_merge_leaves_what_is_held",
    ),
    "a tree that keeps the merge with a state that left": Fault(
        "cmab_kernels/window.py",
        "{(length - 1) // 2} if shrinks else set()",
        "set()",
        "tests/test_window.py::test_random_members_of_a_tree",
    ),
    "a block's window that a failed update changes": Fault(
        "cmab_kernels/nn/cmab/window.py",
        "copy.copy(self.held)",
        "self.held",
        "tests/nn/test_window_stream.py::test_what_is_refused_leaves_the_window",
    ),
    "keys that fade twice as fast": Fault(
        "cmab_kernels/attention/state.py",
        "decay.log() if isinstance(decay, Tensor)",
        "2 * decay.log() if isinstance(decay, Tensor)",
        "tests/test_decay.py::test_attention_equals_a_softmax_of_shifted_logits",
    ),
    "a load that was refused and counts": Fault(
        "cmab_kernels/nn/stream.py",
        "return self._value if errors else value",
        "return value",
        "tests/nn/test_refused_load.py",
    ),
    "a row of no keys that holds numbers": Fault(
        "cmab_kernels/nn/stream.py",
        "state._replace(out=state.out.masked_fill((state.lse == -torch.inf).unsqueeze(-1), 0.0))",
        "state",
        "tests/nn/test_stream.py -k what_a_row_without_keys",
    ),
    "a saved state that torch takes for a stranger": Fault(
        "cmab_kernels/__init__.py",
        "add_safe_globals([AttentionState, RidgeState,",
        "add_safe_globals([AttentionState,",
        "tests/test_saved_states.py",
    ),
    "a cast that loses the stream": Fault(
        "cmab_kernels/nn/stream.py",
        "cast = before.dtype != self.weight_like.dtype",
        "cast = False",
        "tests/nn/test_stream.py::test_a_float64_module_has_a_float64_state "
        "tests/nn/test_continual_stream.py::test_a_cast_stream_goes_on",
    ),
    "sums of another precision that are trusted": Fault(
        "cmab_kernels/nn/continual/window.py",
        "sums[..., -1] = torch.finfo(sums.dtype).max",
        "sums[..., -1] *= 1",
        "tests/nn/test_continual_stream.py::test_a_cast_stream_goes_on",
    ),
    "a stream that keeps what was removed": Fault(
        "cmab_kernels/nn/cmab/streaming.py",
        "self.stream.state = left",
        "self.stream.state = before",
        "tests/nn/test_cmab.py::test_own_stream tests/nn/test_cmab.py::test_removal_forgets",
    ),
    "an update that takes the module's own state": Fault(
        "cmab_kernels/nn/cmab/streaming.py",
        "before = self.stream.held if state is None else state",
        "before = self.stream.held",
        "tests/nn/test_cmab.py::test_updates_equal_one_pass_with_gradients",
    ),
    "blocks of a stack that all get the first one's state": Fault(
        "cmab_kernels/nn/cmab/stack.py",
        "for block, *own in zip(self._blocks, *state, strict=True):",
        "for block, *own in zip(self._blocks, *([part[0]] * len(part) for part in state), strict=True):",
        "tests/nn/test_cmab_stack.py",
    ),
    "padding that reaches a weight's gradient": Fault(
        "cmab_kernels/nn/inputs.py",
        "else features.masked_fill(ignore.unsqueeze(-1), 0.0)",
        "else features",
        "tests/nn/test_cmab.py::test_padding_may_hold_anything_and_sets_may_be_empty "
        "tests/nn/test_multihead_attention.py -k padding",
    ),
    "a last chunk that is not read": Fault(
        "cmab_kernels/nn/cmab/chunks.py",
        "range(0, max(source.shape[-2], 1), CHUNK)",
        "range(0, max(source.shape[-2], 1) - CHUNK + 1, CHUNK)",
        "tests/nn/test_encode.py::test_any_source_gives_the_state_and_its_gradients",
    ),
    "extra keys that are counted in the state": Fault(
        "cmab_kernels/nn/multihead/attention.py",
        "return Attended(self._answer(q, state, query), state)",
        "return Attended(self._answer(q, state, query), self._over_extra_keys(q, state))",
        "tests/nn/test_multihead_attention.py::test_merged_streams_count_the_extra_keys_once",
    ),
    "a window of one token too many": Fault(
        "cmab_kernels/nn/continual/base.py",
        "head[:, :, : self.sequence_len - before]",
        "head[:, :, : self.sequence_len - before + 1]",
        "tests/nn/test_continual.py::test_steps_equal_forward",
    ),
    "a circle of positions that closes too early": Fault(
        "cmab_kernels/nn/continual/positional.py",
        "(~absent).sum(1))) % self.period)",
        "(~absent).sum(1))) % self.sequence_len)",
        "tests/nn/test_positional.py::test_steps_blocks_and_windows_agree",
    ),
    "a stream that begins anew with the tokens of another": Fault(
        "cmab_kernels/nn/continual/rows.py",
        "StaggeredWindow(tokens.masked_fill(gone, 0), ",
        "StaggeredWindow(tokens, ",
        "tests/nn/test_streams_of_a_batch.py::test_each_row_is_a_stream_of_its_own",
    ),
    "a stream that begins anew at the position of another": Fault(
        "cmab_kernels/nn/continual/rows.py",
        "position = window.position.masked_fill(gone[:, None], module.sequence_len)",
        "position = window.position",
        "tests/nn/test_streams_of_a_batch.py::test_each_row_is_a_stream_of_its_own",
    ),
    "a pause that a stream does not make": Fault(
        "cmab_kernels/nn/continual/rows.py",
        "filling if absent is None else filling | absent",
        "filling",
        "tests/nn/test_streams_of_a_batch.py::test_each_row_is_a_stream_of_its_own",
    ),
    "sums of a stream that ended": Fault(
        "cmab_kernels/nn/continual/rows.py",
        "window.sums[rows] = with_sums(first).sums",
        "window.sums[rows] = window.sums[rows]",
        "tests/nn/test_streams_of_a_batch.py::test_long_windows",
    ),
    "a layer that takes what the layer before has not given": Fault(
        "cmab_kernels/nn/continual/encoder.py",
        "absent = absent | ~layer.ready",
        "layer.ready",
        "tests/nn/test_streams_of_a_batch.py::test_each_row_is_a_stream_of_its_own",
    ),
    "a saved stream with tokens of one that ended": Fault(
        "cmab_kernels/nn/continual/window.py",
        "entries[name].masked_fill_(later[:, None, :, None], 0.0)",
        "entries[name].masked_fill_(later[:, None, :, None] & False, 0.0)",
        "tests/nn/test_streams_of_a_batch.py::test_a_saved_stream_has_nothing_of_one_that_ended",
    ),
    "a norm that is forgotten": Fault(
        "cmab_kernels/nn/transformer/informer.py",
        "self._sa_block(self.norm1(src), None, mask)",
        "self._sa_block(src, None, mask)",
        "tests/nn/test_informer.py::test_definition",
    ),
    "landmarks of keys that are those of queries": Fault(
        "cmab_kernels/nn/multihead/nystrom.py",
        "own._project(part, centres)[0] for part in range(2)",
        "own._project(0, centres)[0] for part in range(2)",
        "tests/nn/test_nystrom_attention.py::test_one_clustering_of_the_tokens_of_self_attention",
    ),
    "query heads that meet another's keys": Fault(
        "cmab_kernels/attention/api.py",
        "return part.reshape(batch, heads // groups, groups * latents, *part.shape[3:])",
        "return part.transpose(1, 2).reshape(batch, heads // groups, groups * latents, *part.shape[3:])",
        "tests/integrations/test_transformers.py::test_calls",
    ),
    "a batch that is not mapped": Fault(
        "cmab_kernels/runtime/vmap.py",
        "mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)",
        "mapped = tensor.expand(size, *tensor.shape) if dim is None else tensor",
        "tests/attention/test_suite.py::TestAttentionState::test_vmap",
    ),
    "a tensor given twice with one derivative": Fault(
        "cmab_kernels/runtime/autograd.py",
        "t if t is None else t.view_as(t) if t.requires_grad",
        "t if t is None else t if t.requires_grad",
        "tests/attention tests/intention tests/nystrom -k 'twice or gradgradcheck or any_order'",
    ),
    "a rank whose share is that of another": Fault(
        "cmab_kernels/distributed/merge.py",
        "share_gradient(AttentionState(*own), AttentionState(*merged)",
        "share_gradient(AttentionState(*merged), AttentionState(*merged)",
        "tests/distributed/test_ranks.py::test_cases",
    ),
}

MODELS = {
    "two equal points of which both are forgotten": Fault(
        "python/cmab_models/neural_processes/points.py",
        "ignored |= same & (same.cumsum(1) == 1)",
        "ignored |= same",
        "tests/models/test_neural_processes.py::test_one_of_two_equal_points_is_forgotten",
    ),
    "a block of targets that the next one does not know": Fault(
        "python/cmab_models/neural_processes/base.py",
        "state = self.condition(x, y, state, None",
        "state = self.condition(x, y, None, None",
        "tests/models/test_neural_processes.py::test_a_likelihood_of_blocks_is_a_chain_of_predictions",
    ),
    "a prediction that has seen its target": Fault(
        "python/cmab_models/neural_processes/cmanp.py",
        "self._embedded(x[:, :-1], y[:, :-1])",
        "self._embedded(x[:, 1:], y[:, 1:])",
        "tests/models/test_neural_processes.py::test_likelihoods_after_every_point",
    ),
    "a target that sees points after it": Fault(
        "python/cmab_models/neural_processes/inctnp.py",
        "device=x.device).tril()",
        "device=x.device).tril(1)",
        "tests/models/test_neural_processes.py::test_likelihoods_after_every_point",
    ),
    "a variance taken for a deviation": Fault(
        "python/cmab_models/data/gp.py",
        "noise = NOISE**2 *",
        "noise = NOISE *",
        "tests/models/test_gp.py::test_kernels_scales_and_noise "
        "tests/models/test_gp.py::test_the_posterior_is_the_textbooks",
    ),
    "an event that its own prediction has seen": Fault(
        "python/cmab_models/point_processes/base.py",
        "rows = F.pad(there, (0, 1))",
        "rows = F.pad(there, (1, 0))",
        "tests/models/test_events.py::test_a_prediction_does_not_see_its_event",
    ),
    "a survival taken for its complement": Fault(
        "python/cmab_models/point_processes/mixture.py",
        "torch.special.log_ndtr(-standardised)",
        "torch.special.log_ndtr(standardised)",
        "tests/models/test_events.py::test_the_mixture_is_a_distribution_with_a_closed_mean",
    ),
    "intensities whose excess grows": Fault(
        "python/cmab_models/data/hawkes.py",
        "sum(self.base) * gap - above.sum(-1) * torch.expm1",
        "sum(self.base) * gap + above.sum(-1) * torch.expm1",
        "tests/models/test_events.py::test_the_likelihood_of_a_hawkes_process_is_that_of_its_intensity",
    ),
    "a window of tokens that does not slide": Fault(
        "python/cmab_models/streams/base.py",
        "torch.cat([held.tokens, newest], 1)[:, -self.sequence_len :]",
        "torch.cat([held.tokens, newest], 1)[:, : self.sequence_len]",
        "tests/models/test_streams.py::test_a_step_equals_the_window tests/models/test_streams.py -k 'step_equals or "
        "layers'",
    ),
    "a reward that is forgotten too late": Fault(
        "python/cmab_models/tasks/bandit.py",
        "if memory and len(known) > memory:",
        "if memory and len(known) > memory + 1:",
        "tests/models/test_bandit.py::test_a_stream_updates_and_forgets",
    ),
    "a checkpoint of another run": Fault(
        "python/cmab_models/training/checkpoint.py",
        "if ours != theirs:",
        "if theirs is None:",
        "tests/models/test_training.py::test_checkpoints_that_cannot_be_resumed_say_why",
    ),
    "a first full window of which only the newest token is read": Fault(
        "python/cmab_models/streams/base.py",
        "return features if held is None or held.tokens.shape[1] < self.sequence_len else features[:, -1:]",
        "return features[:, -1:]",
        "tests/models/test_streams.py::test_with_more_layers_the_last_sees_the_newest_features_of_each_window",
    ),
    "a stream that forgets its place": Fault(
        "python/cmab_models/streams/base.py",
        "return StreamState(self.positions.get_state(), None if window",
        "return StreamState(0, None if window",
        "tests/models/test_streams.py::test_a_stream_goes_on_from_its_state_and_errors_leave_it",
    ),
    "saving that ends the stream": Fault(
        "python/cmab_models/streams/base.py",
        "        finally:\n            self.set_state(state)",
        "        finally:\n            pass",
        "tests/models/test_streams.py::test_what_is_saved_comes_back_without_the_stream",
    ),
    "streams whose layers see the oldest token of each window": Fault(
        "python/cmab_models/streams/base.py",
        "features = torch.cat([windows[:, 0], windows[:, 1:, -1]], 1)",
        "features = torch.cat([windows[:, 0], windows[:, 1:, 0]], 1)",
        "tests/models/test_streams.py::test_what_is_trained_is_what_is_streamed",
    ),
    "a NaN that a stream takes": Fault(
        "python/cmab_models/streams/base.py",
        'if embedded.device.type == "cpu" and has_values(embedded) and not embedded.isfinite().all():',
        'if embedded.device.type == "none" and has_values(embedded) and not embedded.isfinite().all():',
        "tests/models/test_streams.py::test_a_stream_goes_on_from_its_state_and_errors_leave_it",
    ),
    "layers whose landmarks are all fitted on the first one's tokens": Fault(
        "python/cmab_models/streams/classifiers.py",
        "            features = each(features)",
        "            each(features)",
        "tests/models/test_streams.py::test_landmarks_are_fitted_layer_by_layer",
    ),
}

FAULTS = {**MODULES, **MODELS}
