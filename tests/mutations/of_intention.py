"""Faults of Intention: sums, solves, the dual form, and the classifiers and regressors made of them."""

from __future__ import annotations

from .fault import Fault

SUITE = "tests/intention/test_suite.py"
NATIVE = "tests/intention/test_native.py"
STATE = "tests/intention/test_state.py"
SOLVE = "tests/intention/solve/test_native.py"
SOLVE_SUITE = "tests/intention/solve/test_suite.py"
KERNELS = "tests/intention/test_triton.py"
SOLVE_KERNELS = "tests/intention/solve/test_triton.py"
CUDA = "tests/intention/solve/test_cuda.py"
PACKED = "tests/intention/test_packed.py"
PACKED_KERNELS = "tests/intention/test_triton_packed.py"

IN_CPP = {
    "packed regressions that end a row late": Fault(
        "csrc/common/packed.h",
        "at(s + 1, rows) - first, 0)",
        "at(s + 1, rows) - first + (s == 0), 0)",
        f"{PACKED}::test_sums_by_the_definition",
    ),
    "packed regressions cut as the longest of them": Fault(
        "csrc/intention/sums.cpp",
        "piece_start(set.count, pieces, piece + 1, run_)",
        "piece_start(set.count, pieces_, piece + 1, run_)",
        f"{PACKED}::test_bits_of_each_set_alone",
    ),
    "packed regressions that count the rows of others": Fault(
        "csrc/intention/sums.cpp",
        "for (int64_t key = set.first; key <",
        "for (int64_t key = 0; key <",
        f"{PACKED}::test_sums_by_the_definition",
    ),
    "packed regressions whose slopes begin with the row of all": Fault(
        "csrc/intention/rows.cpp",
        "int64_t first = set.first + piece_start(set.count,",
        "int64_t first = piece_start(set.count,",
        f"{PACKED}::test_bits_of_each_set_alone",
    ),
    "packed regressions with a slope beyond the last": Fault(
        "csrc/intention/rows.cpp",
        "std::memset(to, 0,",
        "std::memset(to, 1,",
        f"{PACKED}::test_nothing_passes_from_set_to_set",
    ),
    "sums whose last run is dropped": Fault(
        "csrc/intention/sums.cpp",
        "} while (key < end);",
        "} while (key + run_ < end);",
        f"{NATIVE}::test_borders_of_blocks_runs_and_pieces",
    ),
    "pieces of the keys that are not added": Fault(
        "csrc/intention/sums.cpp",
        "moment_of(head)[j] += sums",
        "moment_of(head)[j] = sums",
        f"{NATIVE}::test_borders_of_blocks_runs_and_pieces",
    ),
    "sums before that are not added": Fault(
        "csrc/intention/sums.cpp",
        "add_before(in, before.moment, in.shape.value_width, moment)",
        "(void)before.moment",
        f"{STATE}::test_every_split_gives_the_same_state",
    ),
    "a Gram matrix that is not mirrored": Fault(
        "csrc/intention/sums.cpp",
        "gram[r * width + c] = gram[c * width + r];",
        "gram[r * width + c] = 0;",
        f"{NATIVE}::test_widths",
    ),
    "masked keys that are counted": Fault(
        "csrc/intention/sums.cpp",
        "key * in.ignored_stride[1]] != 0;",
        "key * in.ignored_stride[1]] > 1;",
        f"{STATE}::test_ignored_keys_are_not_counted",
    ),
    "an overflow that stays": Fault(
        "csrc/intention/sums_kernel.h",
        "if (!all_finite(sums[0], R * kColumns))",
        "if (false)",
        f"{NATIVE}::test_sums_beyond_float32",
    ),
    "a gradient that takes the Gram matrix's for symmetric": Fault(
        "csrc/intention/rows.cpp",
        "mirrored = slope.transposed();",
        "mirrored = slope;",
        f"{NATIVE}::test_slopes_of_any_layout {SUITE}::TestRidgeState",
    ),
    "half of a weight's gradient": Fault(
        "csrc/intention/rows_kernel.h",
        "first + k, 1, &sum, T(0.5));",
        "first + k, 1, &sum, T(1));",
        f"{SUITE}::TestWeighted::test_accuracy -k native",
    ),
    "weights that pass by an ignored key": Fault(
        "csrc/intention/rows_kernel.h",
        "weight ? weight[taken] : T(1));",
        "weight ? weight[k] : T(1));",
        f"{NATIVE} -k 'ignored or weights'",
    ),
    "sums for a state in the precision of the keys": Fault(
        "csrc/intention/binding.cpp",
        "inputs.exact = true;",
        "inputs.exact = false;",
        f"{STATE}::test_sums_are_float64_and_exact",
    ),
    "lanes that share one penalty": Fault(
        "csrc/solve/lanes.h",
        "matrix_of(lane) * systems_.alpha_stride",
        "matrix_of(0) * systems_.alpha_stride",
        f"{SOLVE}::test_every_width",
    ),
    "a condition that is judged by half of its columns": Fault(
        "csrc/solve/lanes.h",
        "sum[j] += size * unit;",
        "sum[j] += T(0) * size;",
        f"{SOLVE}::test_the_norm_is_that_of_whole_columns",
    ),
    "NaNs past the end of a system": Fault(
        "csrc/solve/rows.h",
        "for (int64_t i = order_ * kWidth; i < columns_ * kWidth; ++i) strip_[i] = 0;",
        "",
        f"{SOLVE}::test_an_infinity_over_a_number",
    ),
    "a pivot that may be infinite": Fault(
        "csrc/solve/rows.h",
        "positive &= pivot > 0 && pivot < T(kInfinity);",
        "positive &= pivot > 0;",
        f"{SOLVE}::test_a_bad_matrix_leaves_its_neighbours_alone",
    ),
    "a square root of twelve bits, with AVX2": Fault(
        "csrc/common/lanes.h",
        "return _mm256_sqrt_ps((__m256)x);",
        "return _mm256_rcp_ps(_mm256_rsqrt_ps((__m256)x));",
        f"{SOLVE}::test_every_width -k avx2",
        "avx2",
    ),
}

IN_CUDA = {
    "a probe of the condition that is not asked": Fault(
        "csrc/solve/solve_block.cuh",
        "if (probing) worthless |= is_worthless(norm);",
        "(void)probing;",
        f"{CUDA}::test_ill_conditioned_systems_are_told",
    ),
    "a column of the right-hand sides too many": Fault(
        "csrc/solve/solve_block.cuh",
        "(first + c) * system_.rhs_column] : T(0);",
        "(first + c + 1) * system_.rhs_column] : T(0);",
        f"{CUDA}::test_solve",
    ),
}

IN_PYTHON = {
    "packed regressions that share a batch under vmap": Fault(
        "cmab_kernels/intention/schema.py",
        "return inputs.cu_seqlens is not None",
        "return False",
        f"{SUITE}::TestPackedStates::test_vmap",
    ),
    "packed regressions with a row of the next": Fault(
        "cmab_kernels/intention/reference.py",
        "(position >= cu_seqlens[1:, None])",
        "(position > cu_seqlens[1:, None])",
        f"{PACKED}::test_sums_by_the_definition",
    ),
    "packed regressions whose slopes reach others": Fault(
        "cmab_kernels/intention/reference.py",
        "part.masked_fill(hidden, 0.0).sum(",
        "part.sum(",
        f"{PACKED}::test_the_formula_of_the_gradient",
    ),
    "packed regressions beyond the rows": Fault(
        "cmab_kernels/runtime/checks.py",
        "offsets[-1] > length or",
        "offsets[-1] > length + 1 or",
        f"{PACKED}::test_bad_offsets",
    ),
    "packed regressions with the dual of all rows": Fault(
        "cmab_kernels/intention/api.py",
        "length < width and cu_seqlens is None)",
        "length < width)",
        f"{PACKED}::test_small_buffers",
    ),
    "a penalty without its gradient": Fault(
        "cmab_kernels/intention/solve/schema.py",
        '"rhs": z, "alpha": -_trace(product)',
        '"rhs": z, "alpha": 0 * call.inputs.alpha',
        f"{SOLVE_SUITE}::TestRegularisedSolve::test_gradcheck",
    ),
    "a gradient of one triangle alone": Fault(
        "cmab_kernels/intention/solve/schema.py",
        '"gram": (product + product.mT) / -2,',
        '"gram": -product,',
        f"{SOLVE_SUITE}::test_the_gradient_of_a_matrix_belongs_to_both_triangles",
    ),
    "a system that failed and has a solution": Fault(
        "cmab_kernels/intention/solve/reference.py",
        ".masked_fill(failed[..., None, None], torch.nan)",
        "",
        "tests/intention/test_reference.py::test_info_of_the_definition tests/intention/test_promises.py -k info",
    ),
    "a negative penalty that is taken": Fault(
        "cmab_kernels/intention/solve/reference.py",
        "alpha = alpha.masked_fill(alpha < 0, torch.nan)",
        "alpha = alpha + 0",
        f"{SOLVE_SUITE}::test_a_negative_penalty_that_is_not_read_is_told_by_info tests/test_checks.py",
    ),
    "a dual whose weights have no gradient at 0": Fault(
        "cmab_kernels/intention/dual.py",
        "torch.where(absent, residuals / penalty,",
        "torch.where(absent, 0 * residuals,",
        f"{SUITE}::test_gradients_at_a_weight_of_zero",
    ),
    "a dual that is singular where a weight is 0": Fault(
        "cmab_kernels/intention/dual.py",
        " + torch.diag_embed((weights == 0).to(products.dtype))",
        "",
        f"{SUITE}::TestWeightedDual tests/intention/test_reference.py {SUITE}::test_gradients_at_a_weight_of_zero",
    ),
    "a removal of one key too few": Fault(
        "cmab_kernels/intention/state.py",
        "count = state.count - part.count",
        "count = state.count - part.count + 1",
        f"{STATE}::test_removal_gives_back_the_rest",
    ),
    "a count that forgets those before": Fault(
        "cmab_kernels/intention/state.py",
        "before is None else before + present",
        "before is None else present + 0 * before",
        f"{SUITE}::TestRidgeState {STATE}",
    ),
    "a gradient of the sums without its mirror image": Fault(
        "cmab_kernels/intention/reference.py",
        "slope, dmoment = (dgram + dgram.mT).to(dtype)",
        "slope, dmoment = (2 * dgram).to(dtype)",
        "tests/intention/test_reference.py::test_the_gradient_of_the_sums",
    ),
}

IN_TRITON = {
    "packed regressions of wrong offsets": Fault(
        "cmab_kernels/intention/triton/sums.py",
        "bad = tl.load(offsets + tl.num_programs(0) // (heads * DOWN * ACROSS) + 1) != 0",
        "bad = tl.load(offsets + tl.num_programs(0) // (heads * DOWN * ACROSS) + 1) > 1",
        f"{PACKED_KERNELS}::test_wrong_offsets",
    ),
    "packed regressions whose slopes lie apart": Fault(
        "cmab_kernels/intention/triton/row_products.py",
        "        group = head\n",
        "        group = slot\n",
        f"{PACKED_KERNELS}::test_each_set_alone",
    ),
    "a run of keys that has another's": Fault(
        "cmab_kernels/intention/triton/sums.py",
        "last = tl.minimum(first + length, keys)",
        "last = tl.minimum(first + length + 1, keys)",
        f"{KERNELS}::test_several_runs",
    ),
    "weights that are not taken": Fault(
        "cmab_kernels/intention/triton/sums.py",
        "left = left.to(OPERAND) * weight.to(OPERAND)",
        "left = left.to(OPERAND)",
        f"{KERNELS}::test_shapes",
    ),
    "a Gram matrix whose mirror image is not turned": Fault(
        "cmab_kernels/intention/triton/sums.py",
        "row, lower, D, True)",
        "row, lower, D, False)",
        f"{KERNELS}::test_shapes {KERNELS}::test_runs_of_tiles",
    ),
    "an overflow that stays, in Triton": Fault(
        "cmab_kernels/intention/triton/sums.py",
        "exact = tl.where(sound, first, last)",
        "exact = first",
        f"{KERNELS}::test_finite_keys_have_finite_sums",
    ),
    "sums in float32 over a long run": Fault(
        "cmab_kernels/intention/triton/sums.py",
        "if (start - first) % IN_FLOAT32 == IN_FLOAT32 - BLOCK_N:",
        "if start < first:",
        f"{KERNELS}::test_long_runs_lose_no_digits",
    ),
    "NaNs past the end of a system, in Triton": Fault(
        "cmab_kernels/intention/solve/triton/solve.py",
        "tile = tl.where(line < D, tile, 0.0)  # an infinity has left NaNs beyond",
        "tile = tile + 0.0",
        f"{SOLVE_KERNELS}::test_an_infinity_over_a_number",
    ),
    "a negative penalty that is taken, in Triton": Fault(
        "cmab_kernels/intention/solve/triton/solve.py",
        "(failures == 0) & (alpha >= 0.0)",
        "(failures == 0)",
        f"{SOLVE_KERNELS}::test_bad_matrices_are_told_and_leave_the_others_alone "
        f"{SOLVE_KERNELS}::test_agrees_with_the_definition_in_info",
    ),
    "a line that is solved and eliminated from itself": Fault(
        "cmab_kernels/intention/solve/triton/solve.py",
        "left = line > J if FORWARD",
        "left = line >= J + 2 if FORWARD",
        f"{SOLVE_KERNELS}::test_shapes",
    ),
    "an upper triangle that is read": Fault(
        "cmab_kernels/intention/solve/triton/solve.py",
        "below, above = tl.maximum(line, column), tl.minimum(line, column)",
        "above, below = tl.maximum(line, column), tl.minimum(line, column)",
        f"{SOLVE_KERNELS}::test_only_the_lower_triangle_is_read_with_any_strides",
    ),
    "a prefix that is written a key too late in Triton": Fault(
        "cmab_kernels/intention/triton/prefix.py",
        "ends = ((at % every == every - 1) | (at == keys - 1)) & (at < last)\n        pointers, inside = "
        "_tile_of(sums,",
        "ends = ((at % every == 0) | (at == keys - 1)) & (at < last)\n        pointers, inside = _tile_of(sums,",
        f"{KERNELS}::test_prefixes",
    ),
    "runs of prefixes that start from nothing": Fault(
        "cmab_kernels/intention/triton/prefix.py",
        "    if base is not None:",
        "    if False:",
        f"{KERNELS}::test_prefixes_of_several_runs_on_top_of_a_state",
    ),
    "a key that is not part of its own prefix backward": Fault(
        "cmab_kernels/intention/triton/prefix.py",
        "slopes = total[None, :, :] + tl.cumsum(tile, 0)",
        "slopes = total[None, :, :] + tl.cumsum(tile, 0) - tile",
        f"{KERNELS}::test_prefixes",
    ),
    "a scan that adds a run's own total before it": Fault(
        "cmab_kernels/intention/triton/scan.py",
        "taken = tl.where(order > 0, step - passed, step + passed)",
        "taken = step",
        f"{KERNELS}::test_prefixes_of_several_runs_on_top_of_a_state",
    ),
}

FAULTS = {**IN_CPP, **IN_CUDA, **IN_PYTHON, **IN_TRITON}
