"""Faults of Nyström attention, of the pseudo-inverse, and of continual steps."""

from __future__ import annotations

from .fault import Fault

SUITE = "tests/nystrom/test_suite.py"
NATIVE = "tests/nystrom/test_native.py"
REFERENCE = "tests/nystrom/test_reference.py"
STEPS = "tests/nystrom/continual/test_native.py"
STATE = "tests/nystrom/continual/test_state.py"
OWNERSHIP = "tests/nystrom/continual/test_ownership.py"
KERNELS = "tests/nystrom/test_triton.py"
STEP_KERNELS = "tests/nystrom/continual/test_triton.py"
STEP_GRADIENTS = "tests/nystrom/continual/test_triton_gradient.py"
CUDA = "tests/nystrom/continual/test_cuda.py"
GRADIENT = "tests/nystrom/continual/test_gradient.py"
MASKED = "tests/nystrom/continual/test_masked.py"

IN_CPP = {
    "a huge logit that is subtracted": Fault(
        "csrc/continual/sums.h",
        "<= kLargestSure<T>;",
        "<= kLargest<T>;",
        "tests/nystrom/continual/test_suite.py::test_the_largest_of_huge_logits_leaves",
    ),
    "a guard that never asks": Fault(
        "csrc/continual/sums.h",
        "if (!is_sound(",
        "if (rows < 0 && !is_sound(",
        f"{STEPS}::test_values_that_dwarf_the_rest {STEPS}::test_laws_of_logits",
    ),
    "a sum that keeps its factor": Fault(
        "csrc/continual/sums.h",
        "const V phi = load<V>(at_.phi + r) * kept + added - removed;",
        "const V phi = load<V>(at_.phi + r) + added - removed;",
        f"{STEPS}::test_every_step",
    ),
    "values that fade unseen": Fault(
        "csrc/continual/sums.h",
        "(size >= load<V>(at_.largest + r) * T(kLeastOfPeak)) & ",
        "",
        "tests/nystrom/continual/test_suite.py::test_values_that_fade",
    ),
    "a log-scale that follows every logit": Fault(
        "csrc/continual/sums.h",
        "logit > before + T(kHeadroom)",
        "logit > before",
        "tests/nystrom/continual/test_drift.py::test_exact_rows_live_long_enough_to_drift",
    ),
    "sums of torch taken for a kernel's": Fault(
        "cmab_kernels/nystrom/continual/reference.py",
        "total.detach(), sizes, peak]",
        "total.detach(), sizes, sizes]",
        "tests/nystrom/continual/test_drift.py::test_what_torch_has_added_leaves_nothing",
    ),
    "a token that leaves too late": Fault(
        "csrc/continual/kernel.h",
        "with(newest - shape_.window, scratch_",
        "with(newest - shape_.window + 1, scratch_",
        f"{STEPS}::test_every_step",
    ),
    "a landmark replaced a token late": Fault(
        "csrc/continual/schedule.h",
        "Int((position - 1) % window) + 1;",
        "Int((position - 2 + window) % window) + 1;",
        f"{STEPS}::test_every_step",
    ),
    "a stream at the position of the first": Fault(
        "csrc/continual/kernel.h",
        "position_(stream.positions[head])",
        "position_(stream.positions[0])",
        f"{STATE}::test_streams_joined_by_hand",
    ),
    "a segment that ends in the first stream alone": Fault(
        "csrc/continual/continual.cpp",
        "stream.positions[head] != stream.positions[head - 1]",
        "stream.positions[head] == stream.positions[0] - 1",
        f"{STATE}::test_streams_joined_by_hand",
    ),
    "a row without a token that steps": Fault(
        "csrc/continual/continual.cpp",
        "keep(stream, head, stream.landmarks);",
        "kernel.nystrom(stream, head, scratch);",
        f"{MASKED}::test_each_row_is_a_stream_of_its_own",
    ),
    "a row without a token whose position moves": Fault(
        "csrc/continual/next_state.cpp",
        "(stream.has_tokens(head) ? shape.tokens : 0)",
        "shape.tokens",
        f"{MASKED}::test_each_row_is_a_stream_of_its_own",
    ),
    "a row without a token whose position moves in the definition": Fault(
        "cmab_kernels/nystrom/continual/reference.py",
        "position = before.position.where(absent[:, None], after.position)",
        "position = after.position",
        f"{MASKED}::test_each_row_is_a_stream_of_its_own",
    ),
    "sums that are not there yet taken for sums": Fault(
        "cmab_kernels/nystrom/continual/state.py",
        "UNSURE = 2.0**100",
        "UNSURE = 0.0",
        f"{MASKED}::test_a_first_retroactive_step_may_be_masked",
    ),
    "a longer segment taken for a shorter one": Fault(
        "csrc/continual/schedule.h", "== 0 ? size + 1 : 0;", "== 0 ? size : 0;", f"{STEPS}::test_every_step {STATE}"
    ),
    "rows that do not move up with their landmarks": Fault(
        "csrc/continual/kernel.h",
        "this->exchange(segment ? 1 : 0, kept",
        "this->exchange(0, kept",
        f"{STEPS}::test_every_step",
    ),
    "a gradient that does not follow the log-scale": Fault(
        "csrc/continual/backward_kernel.h",
        "if (before != log_scale) {",
        "if (before > log_scale) {",
        f"{GRADIENT}::test_a_chain_of_steps",
    ),
    "the gradient of a token that left, with the sign of one that came": Fault(
        "csrc/continual/backward_kernel.h",
        "-exponential_of(removed_[i] - log_scale)",
        "exponential_of(removed_[i] - log_scale)",
        f"{GRADIENT}::test_a_chain_of_steps",
    ),
    "the gradient of a query's row, in the row of the query before": Fault(
        "csrc/continual/backward_kernel.h",
        "return slides_ ? token + 1 : 0;",
        "return slides_ ? token : 0;",
        "tests/nystrom/continual/test_retroactive_gradient.py",
    ),
    "outputs whose gradient leaves out the sum of weights": Fault(
        "csrc/continual/backward_kernel.h",
        "to[value_width_] -= over_phi * over_phi * dot(dout, sums, value_width_);",
        "to[value_width_] -= 0;",
        "tests/nystrom/continual/test_retroactive_gradient.py",
    ),
    "a gradient of exact attention that is a token late": Fault(
        "csrc/continual/backward_kernel.h",
        "const int64_t first = token + 1, window = shape_.window;",
        "const int64_t first = token, window = shape_.window;",
        f"{GRADIENT}::test_exact_attention",
    ),
    "an output of a step that is an element too wide": Fault(
        "csrc/continual/kernel.h",
        "for (int e = 0; e < shape_.value_width; ++e) narrow(from[e] * factor, to + e);",
        "for (int e = 0; e <= shape_.value_width; ++e) narrow(from[e] * factor, to + e);",
        "tests/guards/test_walls.py::test_nothing_outside_is_read_or_written",
    ),
    "memory of which somebody else holds a view": Fault(
        "csrc/common/ownership.cpp",
        "return is_one(counts().storage_uses, entry->second.storage.ptr()) &&",
        "return",
        f"{OWNERSHIP}::test_what_is_held_stays",
    ),
    "memory that the library did not make": Fault(
        "csrc/common/ownership.cpp",
        "if (entry == known.end() || !entry->second.is(tensor) || seen.data != entry->second.data) return false;",
        "if (entry == known.end()) return true;",
        f"{OWNERSHIP}::test_states_made_by_hand_of_one_memory",
    ),
    "logits that stay infinite": Fault(
        "csrc/continual/rows.h",
        "if (__builtin_expect(!finite, 0)) mend_logits",
        "if (count < 0) mend_logits",
        f"{STEPS}::test_logits_up_to_the_largest_number {STEPS}::test_products_that_cancel_beyond_the_largest_number",
    ),
    "a pseudo-inverse that starts from one norm": Fault(
        "csrc/nystrom/kernel.h",
        "x / columns_.divisor() / rows_.divisor()",
        "x / columns_.divisor()",
        f"{NATIVE}::test_inverses",
    ),
    "a last iterate that is not the result": Fault(
        "csrc/nystrom/kernel.h",
        "std::swap(inverse_, even_);",
        "if (odd_ == even_) std::swap(inverse_, even_);",
        f"{NATIVE}::test_inverses",
    ),
    "a gradient that forgets the norms": Fault(
        "csrc/nystrom/backward_kernel.h", "- sign * slope);", "- T(0) * sign * slope);", f"{NATIVE}::test_inverses"
    ),
    "columns of a norm that tie and share nothing": Fault(
        "csrc/nystrom/backward_kernel.h",
        "product / sums.largest / T(count)",
        "product / sums.largest",
        f"{NATIVE}::test_inverses",
    ),
}

IN_CUDA = {
    "a huge logit that is subtracted in CUDA": Fault(
        "csrc/continual/sliding_rows.cuh",
        "std::fabs(top) <= kLargestSure<S>",
        "true",
        f"{CUDA}::test_the_largest_of_huge_logits_leaves",
    ),
    "values that fade unseen in CUDA": Fault(
        "csrc/continual/sliding_rows.cuh",
        " && size >= largest / 2",
        "",
        f"{CUDA}::test_values_that_fade",
    ),
    "a log-scale that follows every logit in CUDA": Fault(
        "csrc/continual/sliding_rows.cuh",
        "comes > before + kHeadroom ? comes : before",
        "comes > before ? comes : before",
        f"{CUDA}::test_log_scales",
    ),
    "a peak that is not looked at": Fault(
        "csrc/continual/sliding_rows.cuh",
        "return !(phi >= peak / 2 &&",
        "return !(phi >= 0 * peak &&",
        f"{CUDA}::test_weights_that_outweigh_the_rest",
    ),
    "a token that is subtracted twice": Fault(
        "csrc/continual/sliding_rows.cuh",
        "return std::fma(-change[2], goes,",
        "return std::fma(-2 * change[2], goes,",
        f"{CUDA}::test_nystrom",
    ),
    "a maximum of the first tile alone": Fault(
        "csrc/continual/window.cuh",
        "kept_[thread] = std::exp(before - top);",
        "kept_[thread] = 1;",
        f"{CUDA}::test_nystrom {CUDA}::test_exact",
    ),
    "a mean of the wrong tokens": Fault(
        "csrc/continual/nystrom_step.cuh",
        "for (int i = call_.window - segment; i < call_.window; ++i)",
        "for (int i = 0; i < segment; ++i)",
        f"{CUDA}::test_nystrom",
    ),
    "an inverse read by columns": Fault(
        "csrc/continual/nystrom_step.cuh",
        "inverse_[r * m + pair % m]",
        "inverse_[pair % m * m + r]",
        f"{CUDA}::test_nystrom",
    ),
}

IN_PYTHON = {
    "norms of the whole batch": Fault(
        "cmab_kernels/nystrom/reference.py",
        "matrix.abs().sum(dim).amax(-1)[..., None, None]",
        "matrix.abs().sum(dim).amax()",
        f"{REFERENCE}::test_each_matrix_has_its_own_norms",
    ),
    "longer segments at the end": Fault(
        "cmab_kernels/nystrom/reference.py",
        "torch.arange(segments, device=like.device).lt(longer)",
        "torch.arange(segments, device=like.device).ge(segments - longer)",
        f"{REFERENCE}::test_segment_means_as_landmarks",
    ),
    "logits of the definition that stay infinite": Fault(
        "cmab_kernels/nystrom/reference.py",
        ".clamp(-largest, largest)",
        "",
        f"{REFERENCE}::test_logits_beyond_the_range_are_at_its_end",
    ),
    "padding in a landmark": Fault(
        "cmab_kernels/nystrom/api.py",
        "segment_means(key, number, mask)",
        "segment_means(key, number)",
        f"{REFERENCE}::test_a_mask_hides_tokens_and_empty_segments",
    ),
    "a landmark of no tokens": Fault(
        "cmab_kernels/nystrom/api.py",
        "absent_segments(mask, number))",
        "absent_segments(mask & False, number))",
        f"{REFERENCE}::test_a_mask_hides_tokens_and_empty_segments tests/nystrom/test_promises.py::test_masked_blocks",
    ),
    "an ignored query that is read": Fault(
        "cmab_kernels/nystrom/api.py",
        "query = query.masked_fill(key_padding_mask[:, None, :, None], 0.0)",
        "query = query + 0.0",
        f"{REFERENCE}::test_an_ignored_query_is_one_of_zeros",
    ),
    "a segment that ends a token early": Fault(
        "cmab_kernels/nystrom/continual/reference.py",
        "phase = (position - 1) % window + 1",
        "phase = position % window + 1",
        f"{STATE}::test_a_landmark_is_replaced_when_its_segment_is_full",
    ),
    "rows of a ring that are one too far": Fault(
        "cmab_kernels/nystrom/continual/state.py",
        "torch.arange(-tokens, 0, device=position.device)",
        "torch.arange(1 - tokens, 1, device=position.device)",
        f"tests/nn/test_continual_stream.py::test_saved_and_restored_at_every_step {STATE}",
    ),
    "a step in memory that others read": Fault(
        "cmab_kernels/nystrom/continual/state.py",
        "sole = _ownership() is not None and _ownership().is_sole_owner(state)",
        "sole = _ownership() is not None",
        f"{STEP_KERNELS}::test_in_place_is_out_of_place {STEP_KERNELS} -k 'place or owner'",
    ),
}

IN_TRITON = {
    "a softmax whose gradient forgets the sum": Fault(
        "cmab_kernels/nystrom/triton/landmarks.py",
        "dlogits = a * (da - tl.sum(a * da, 1)[:, None])",
        "dlogits = a * da",
        f"{KERNELS}::test_landmarks",
    ),
    "absent landmarks in the sums of the others": Fault(
        "cmab_kernels/nystrom/triton/landmarks.py",
        "tl.where(both, tl.exp2((logits - peak[:, None]) * LOG2_E), 0.0)",
        "tl.exp2((logits - peak[:, None]) * LOG2_E)",
        f"{KERNELS}::test_absent_landmarks_are_not_there",
    ),
    "logits that stay infinite, in Triton": Fault(
        "cmab_kernels/nystrom/triton/landmarks.py",
        "logits = tl.where(logits > largest, largest, tl.where(logits < -largest, -largest, logits))",
        "logits = logits + 0.0",
        f"{KERNELS}::test_logits_beyond_the_range_are_at_its_end",
    ),
    "a dropped last block of a product": Fault(
        "cmab_kernels/nystrom/triton/blocks.py",
        "for k in range(0, inner, BLOCK):",
        "for k in range(0, inner - BLOCK + 1, BLOCK):",
        f"{KERNELS}::test_inverses_in_blocks",
    ),
    "a product without its shift": Fault(
        "cmab_kernels/nystrom/triton/blocks.py",
        "identity_block(shift, k, j, OPERAND) - b)",
        "b)",
        f"{KERNELS}::test_landmarks_in_blocks",
    ),
    "an iterate that is written over": Fault(
        "cmab_kernels/nystrom/triton/blocks.py",
        "        z, new = new, z\n",
        "        new = z\n",
        f"{STEP_KERNELS}::test_more_landmarks_than_registers_hold",
    ),
    "a huge logit that is subtracted in Triton": Fault(
        "cmab_kernels/nystrom/continual/triton/sliding_rows.py",
        "sound = sure & ",
        "sound = ",
        f"{STEP_KERNELS}::test_the_largest_of_huge_logits_leaves",
    ),
    "no guard on phi": Fault(
        "cmab_kernels/nystrom/continual/triton/sliding_rows.py",
        "(phi >= 0.5 * peak) & ",
        "",
        f"{STEP_KERNELS}::test_weights_that_outweigh_the_rest",
    ),
    "no guard on values": Fault(
        "cmab_kernels/nystrom/continual/triton/sliding_rows.py",
        "(size >= 0.5 * largest) & ",
        "",
        f"{STEP_KERNELS}::test_values_that_fade {STEP_KERNELS}::test_values_that_outweigh_the_rest",
    ),
    "a log-scale that follows every logit in Triton": Fault(
        "cmab_kernels/nystrom/continual/triton/sliding_rows.py",
        "top_before + HEADROOM",
        "top_before",
        f"{STEP_KERNELS}::test_log_scales",
    ),
    "a new token that is subtracted": Fault(
        "cmab_kernels/nystrom/continual/triton/sliding_rows.py",
        "newest, gone = row_of(tokens - 1, oldest, capacity), row_of(-1, oldest, capacity)",
        "newest, gone = row_of(tokens - 1, oldest, capacity), row_of(0, oldest, capacity)",
        f"{STEP_KERNELS}::test_fixed_landmarks",
    ),
    "rows that are never made anew on schedule": Fault(
        "cmab_kernels/nystrom/continual/triton/nystrom.py",
        "due = ((position - row) % SCHEDULE == 0) | (spoilt > 0)",
        "due = (row < 0) | (spoilt > 0)",
        f"{STEP_KERNELS}::test_rows_are_made_anew_on_schedule",
    ),
    "rows that do not move up with their landmarks, in Triton": Fault(
        "cmab_kernels/nystrom/continual/triton/nystrom.py",
        "shift = tl.where(segment > 0, 1, 0)",
        "shift = tl.where(segment > 0, 0, 0)",
        f"{STEP_KERNELS}::test_nystrom",
    ),
    "a landmark replaced a token late, in Triton": Fault(
        "cmab_kernels/nystrom/continual/triton/landmarks.py",
        "phase = (position - 1) % window + 1",
        "phase = position % window + 1",
        f"{STEP_KERNELS}::test_nystrom",
    ),
    "a recomputed row whose earlier sums get a gradient": Fault(
        "cmab_kernels/nystrom/continual/triton/backward.py",
        "kept = tl.where(slid, ",
        "kept = tl.where(known, ",
        f"{STEP_GRADIENTS}::test_a_chain_of_steps",
    ),
    "no gradient of the token that leaves": Fault(
        "cmab_kernels/nystrom/continual/triton/backward.py",
        "_through_token(t, -1.0, ",
        "_through_token(t, 0.0, ",
        f"{STEP_GRADIENTS}::test_a_chain_of_steps",
    ),
    "second derivatives without the tokens that left": Fault(
        "cmab_kernels/nystrom/continual/triton/backward.py",
        "kept = there & (i < known)[:, None]",
        "kept = there & ((i < known) & (number + i >= capacity - known))[:, None]",
        f"{STEP_GRADIENTS}::test_second_derivatives",
    ),
}

FAULTS = {**IN_CPP, **IN_CUDA, **IN_PYTHON, **IN_TRITON}
