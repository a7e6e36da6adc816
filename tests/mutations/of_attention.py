"""Faults of latent attention, of the states of all prefixes, and of attention over projected inputs."""

from __future__ import annotations

from .fault import Fault

SUITE = "tests/attention/test_suite.py::TestAttentionState"
BIAS = "tests/attention/test_key_bias.py"
NATIVE = "tests/attention/test_native.py"
BF16 = "tests/attention/test_bf16.py"
STATE = "tests/attention/test_state.py"
KERNELS = "tests/attention/test_triton.py"
PREFIX = "tests/attention/prefix/test_suite.py"
PREFIX_KERNELS = "tests/attention/prefix/test_triton.py"
DECAY = "tests/attention/prefix/test_decay.py"
PROJECTED = "tests/attention/projected/test_suite.py"
PROJECTED_KERNELS = "tests/attention/projected/test_triton.py"
NARROW = "tests/test_instruction_sets.py::test_accuracy"

IN_CPP = {
    "a mask off by one": Fault(
        "csrc/common/tile.h",
        "keys.ignored[(first + k) * keys.ignored_stride]",
        "keys.ignored[(first + k / 2) * keys.ignored_stride]",
        f"{SUITE}::test_masks -k native",
    ),
    "rows of masked keys that are not left out": Fault(
        "csrc/common/tile.h",
        "copy_row(from + present.row[k] * matrix.row_stride",
        "copy_row(from + k * matrix.row_stride",
        f"{SUITE}::test_masks -k native",
    ),
    "a step along a row taken for 1": Fault(
        "csrc/common/tile.h",
        "to[d] = widen(from[d * step]);",
        "to[d] = widen(from[d]);",
        f"{SUITE}::test_layouts -k native",
    ),
    "a key too many": Fault(
        "csrc/attention/forward_kernel.h",
        "s[r][c] = k + r < count ? s[r][c]",
        "s[r][c] = k + r <= count ? s[r][c]",
        f"{NATIVE}::test_borders_of_tiles_and_pieces",
    ),
    "a missing rescale": Fault(
        "csrc/attention/forward_kernel.h",
        "store(acc, load<V>(acc) * factor);",
        "store(acc, load<V>(acc));",
        f"{SUITE}::test_accuracy -k native",
    ),
    "a sum that is not rescaled": Fault(
        "csrc/attention/forward_kernel.h",
        "store(state.sum + at, load<V>(state.sum + at) * factor);",
        "store(state.sum + at, load<V>(state.sum + at));",
        f"{SUITE}::test_accuracy -k 'native and ten'",
    ),
    "a wrong stride": Fault(
        "csrc/attention/plan.h",
        "b * operand.stride[0] + h * operand.stride[1]",
        "b * operand.stride[0] + h * operand.stride[2]",
        f"{SUITE}::test_layouts -k native",
    ),
    "a 32-bit offset": Fault(
        "csrc/attention/plan.h",
        "const int64_t offset = b * operand",
        "const int32_t offset = b * operand",
        f"{NATIVE}::test_offsets_beyond_32_bits",
    ),
    "a packed set that ends a key late": Fault(
        "csrc/attention/plan.h",
        "offset(b + 1) - first, 0)",
        "offset(b + 1) - first + (b == 0), 0)",
        f"{NATIVE}::test_packed_sets",
    ),
    "a dropped last block": Fault(
        "csrc/common/plan.h",
        "ceil_div(count, unit) * i / pieces",
        "count / unit * i / pieces",
        f"{NATIVE}::test_borders_of_tiles_and_pieces",
    ),
    "tiny numbers that are not flushed to zero": Fault(
        "csrc/common/plan.h", "before_ | _MM_FLUSH_ZERO_ON", "before_", "tests/test_tiny_numbers.py"
    ),
    "a caller whose tiny numbers are flushed": Fault(
        "csrc/common/plan.h", "_mm_setcsr(before_); }", "}", "tests/test_tiny_numbers.py"
    ),
    "a group of queries of one head taken for neighbouring heads": Fault(
        "csrc/attention/forward.cpp",
        "groups_[g + heads].first_row == group.first_row)",
        "groups_[g + heads].first_row >= 0)",
        f"{NATIVE}::test_same_bits_for_any_threads_and_alone",
    ),
    "pieces of the keys that are not merged": Fault(
        "csrc/attention/merge.h",
        "absorb(at.total[row], at.acc + row * width, sums, at.part + row * width, width);",
        "at.total[row] = sums;",
        f"{NATIVE}::test_borders_of_tiles_and_pieces",
    ),
    "base 2 for base e": Fault(
        "csrc/attention/merge.h", "at.reference[row] * kLn2", "at.reference[row]", f"{SUITE}::test_accuracy -k native"
    ),
    "an empty row divided by its sum": Fault(
        "csrc/attention/merge.h", "if (mix.lse == -INFINITY)", "if (false)", f"{SUITE}::test_empty_extents -k native"
    ),
    "a row of a result that is an element too wide": Fault(
        "csrc/attention/merge.h",
        "for (int e = 0; e < width; ++e) to[e] = T(mix.sums * acc[e]);",
        "for (int e = 0; e <= width; ++e) to[e] = T(mix.sums * acc[e]);",
        "tests/guards/test_walls.py::test_nothing_outside_is_read_or_written",
    ),
    "a merged row that is an element too wide": Fault(
        "csrc/attention/forward.cpp",
        "for (int e = 0; e < width; ++e) to[e] = T(share * a[e] + other * b[e]);",
        "for (int e = 0; e <= width; ++e) to[e] = T(share * a[e] + other * b[e]);",
        "tests/guards/test_walls.py::test_nothing_outside_is_read_or_written",
    ),
    "scores past the last key": Fault(
        "csrc/common/tile.h",
        "if (present.all && matrix.col_stride == 1 && width == padded &&",
        "if (present.row[present.count - 1] == present.count - 1 && matrix.col_stride == 1 && width == padded &&",
        "tests/guards/test_walls.py::test_nothing_outside_is_read_or_written",
    ),
    "a removal of a huge logit that is reliable": Fault(
        "csrc/attention/merge.h", "size <= kSureRounding / eps * left ||", "size < INFINITY ||", f"{STATE} -k digits"
    ),
    "a removal of nothing that is not reliable": Fault(
        "csrc/attention/merge.h",
        "reliable_[row] = sums.empty() ? left == 1 :",
        "reliable_[row] =",
        f"{STATE} -k removal",
    ),
    "= for +=": Fault(
        "csrc/attention/backward.cpp",
        "sum.total[i] += sum.part[i];",
        "sum.total[i] = sum.part[i];",
        f"{NATIVE} -k pieces",
    ),
    "= for += over pieces of the queries": Fault(
        "csrc/attention/backward.cpp",
        "total += parts[piece * step + i];",
        "total = parts[piece * step + i];",
        f"{NATIVE}::test_many_queries",
    ),
    "a packed set's gradient where another's belongs": Fault(
        "csrc/attention/backward.cpp",
        "* in_.keys + head.set.first + key;",
        "* in_.keys + key;",
        f"{NATIVE}::test_packed_sets",
    ),
    "a lost gradient through lse": Fault(
        "csrc/attention/backward.cpp",
        " - *dlse_.at<double>(head.b, head.h, first + row);",
        ";",
        f"{NATIVE}::test_widths",
    ),
    "a gradient of an ignored key, in bfloat16": Fault(
        "csrc/attention/bf16_backward.h",
        "_mm512_maskz_loadu_ps(kept ? mask : 0, row + c)",
        "_mm512_maskz_loadu_ps(mask, row + c)",
        BF16,
    ),
    "a gradient of scores without delta, in bfloat16": Fault(
        "csrc/attention/bf16_backward.h",
        "_mm512_sub_ps(_mm512_loadu_ps(dweight), delta)",
        "_mm512_loadu_ps(dweight)",
        BF16,
    ),
    "lse in one part, in bfloat16": Fault(
        "csrc/attention/bf16_backward.h",
        "empty ? 0.0f : static_cast<float>(logarithm - packed.high[i]);",
        "0.0f;",
        f"{BF16} -k gradients_take_lse_in_two_parts",
    ),
    "a prefix that is written a key too late": Fault(
        "csrc/prefix/rows.h", "key == end};", "key + 1 == end};", f"{PREFIX} -k 'native and accuracy'"
    ),
    "later prefixes that send nothing back": Fault(
        "csrc/prefix/backward_kernel.h",
        "slope + sent.share[to_row] * a[r][c]",
        "slope + T(0) * sent.share[to_row] * a[r][c]",
        f"{PREFIX} -k 'native and accuracy'",
    ),
    "sums of prefixes that are not rescaled": Fault(
        "csrc/prefix/forward_kernel.h",
        "x *= stretch->factors[lane + r];",
        "(void)x;",
        f"{PREFIX} -k 'native and accuracy'",
    ),
    "prefixes that forget the incoming state's sum": Fault(
        "csrc/prefix/forward_kernel.h",
        "state.sum[row] = T(__builtin_exp2(lse - double(state.reference[row])));",
        "state.sum[row] = 1;",
        f"{PREFIX}::test_a_state_that_nothing_is_added_to_stays",
    ),
    "a chunk that shares another's mask": Fault(
        "csrc/projected/projection.h",
        "(set.first + first) * all.ignored_stride[1]",
        "(set.first + first / 2) * all.ignored_stride[1]",
        f"{PROJECTED} -k 'native and masks'",
    ),
    "a block that overwrites another's gradient": Fault(
        "csrc/projected/backward.cpp", "k > 0 || i > 0", "i > 0", f"{PROJECTED} -k 'native and accuracy and Stacked'"
    ),
    "values whose weights have no gradient": Fault(
        "csrc/projected/backward.cpp",
        "rows, to[0].weight[i]);",
        "rows, to[0].weight[0]);",
        f"{PROJECTED} -k 'native and accuracy'",
    ),
    "halves of a vector that change places, with AVX2": Fault(
        "csrc/attention/forward_kernel.h",
        "_mm256_set_m128(_mm256_cvtpd_ps(high * factor), _mm256_cvtpd_ps(low * factor))",
        "_mm256_set_m128(_mm256_cvtpd_ps(low * factor), _mm256_cvtpd_ps(high * factor))",
        f"{NARROW} -k 'avx2 and attention-TestAttentionState'",
        "avx2",
    ),
    "a key too many, with AVX2": Fault(
        "csrc/attention/forward_kernel.h",
        "s[r][c] = k + r < count ? s[r][c]",
        "s[r][c] = k + r <= count ? s[r][c]",
        f"{NATIVE}::test_borders_of_tiles_and_pieces -k avx2",
        "avx2",
    ),
    "a key too many, without AVX": Fault(
        "csrc/attention/forward_kernel.h",
        "s[r][c] = k + r < count ? s[r][c]",
        "s[r][c] = k + r <= count ? s[r][c]",
        f"{NATIVE}::test_borders_of_tiles_and_pieces -k portable",
        "portable",
    ),
    "NaN that a maximum drops, with AVX2": Fault(
        "csrc/common/simd.h",
        "return _mm256_max_ps(a, b);",
        "return _mm256_max_ps(b, a);",
        f"{NATIVE}::test_a_bad_query_stays_in_its_row -k avx2",
        "avx2",
    ),
    "any lane taken for all of them, with AVX2": Fault(
        "csrc/common/simd.h",
        "_mm256_movemask_epi8((__m256i)mask) != 0;",
        "_mm256_movemask_epi8((__m256i)mask) == -1;",
        f"{NATIVE}::test_a_key_of_another_size -k avx2",
        "avx2",
    ),
    "a last lane that is not loaded, with AVX2": Fault(
        "csrc/common/lanes.h",
        "kSet + 8 - count * int64_t(sizeof(T) / 4)",
        "kSet + 8 - (count - 1) * int64_t(sizeof(T) / 4)",
        f"{NARROW} -k 'avx2 and attention.prefix'",
        "avx2",
    ),
    "sums of prefixes that are not rescaled, with AVX2": Fault(
        "csrc/prefix/forward_kernel.h",
        "x *= stretch->factors[lane + r];",
        "(void)x;",
        f"{NARROW} -k 'avx2 and attention.prefix'",
        "avx2",
    ),
    "the gradient of a bias by the last queries alone": Fault(
        "csrc/attention/backward_kernel.h",
        "sums[k] += sum_lanes(total);",
        "sums[k] = sum_lanes(total);",
        f"{BIAS}::test_is_its_definition -k native",
    ),
    "a logarithm of too few terms": Fault(
        "csrc/prefix/rows.h",
        "for (int n = kSingle ? 9 : 21;",
        "for (int n = kSingle ? 3 : 7;",
        f"{PREFIX} -k 'native and accuracy'",
    ),
    "keys past whole steps that are not scored": Fault(
        "csrc/prefix/rows.h",
        "for (; k < last; ++k) function(std::integral_constant<int, 1>{}, k);",
        "for (; k + 1 < last; ++k) function(std::integral_constant<int, 1>{}, k);",
        f"{PREFIX} -k 'native and accuracy'",
    ),
    "a decay that a reference rounds off": Fault(
        "csrc/prefix/forward_kernel.h", "offset_ -= fade[i];", "offset_ = 0;", f"{DECAY} -k long_streams"
    ),
    "sums that do not take what a large reference cannot": Fault(
        "csrc/prefix/forward_kernel.h",
        "next - reference != fade && reference != -kInfinity",
        "next != next",
        f"{DECAY} -k fades_exactly",
    ),
    "a share that has not faded": Fault(
        "csrc/prefix/backward_kernel.h",
        "log_share(lse + in.decay.before(chunk), of)",
        "log_share(lse, of)",
        f"{DECAY} -k 'repeated and native'",
    ),
    "a bias that fades a key too often": Fault(
        "cmab_kernels/attention/prefix/api.py",
        "pad(since[..., 1:], (0, 1))",
        "since",
        f"{DECAY} -k repeated",
    ),
    "windows of prefixes that do not fade, in Triton": Fault(
        "cmab_kernels/attention/prefix/triton/forward.py",
        "            own -= faded\n",
        "",
        f"{PREFIX_KERNELS} -k bias_and_decay",
    ),
    "prefixes of a window that do not fade, in Triton": Fault(
        "cmab_kernels/attention/prefix/triton/forward.py",
        "below if until is None else below + at",
        "below",
        f"{PREFIX_KERNELS} -k bias_and_decay",
    ),
    "lse of prefixes in another's rows": Fault(
        "csrc/prefix/prefix.cpp", "lse + head * rows};", "lse};", f"{PREFIX} -k 'native and accuracy'"
    ),
    "= for += of an incoming state's gradient": Fault(
        "csrc/prefix/backward_kernel.h",
        "slope += double(a) * (apart",
        "slope = double(a) * (apart",
        f"{PREFIX} -k 'native and IncomingState'",
    ),
    "a slope of few keys from a vector of columns alone": Fault(
        "csrc/prefix/backward_kernel.h",
        "products[r] += load<V>(a + r * width + e) * load<V>(value.rows + k * value.stride + e);",
        "products[r] = load<V>(a + r * width + e) * load<V>(value.rows + k * value.stride + e);",
        f"{PREFIX} -k 'native and accuracy'",
    ),
}

IN_PYTHON = {
    "a bias that leads to no gradient": Fault(
        "cmab_kernels/attention/schema.py",
        'needs = call.needs("query", "key", "value", "key_bias")',
        'needs = (*call.needs("query", "key", "value"), False)',
        f"{BIAS}::test_is_its_definition -k native",
    ),
    "a key that a bias excludes, and that is read": Fault(
        "cmab_kernels/attention/reference.py",
        "ignore = excluded if ignore is None else excluded | ignore",
        "ignore = excluded if ignore is None else ignore",
        f"{BIAS}::test_excluded_keys -k reference",
    ),
    "a lost gradient to the state's lse": Fault(
        "cmab_kernels/attention/state.py",
        "(share * slope)",
        "(0 * slope)",
        "tests/attention/test_suite.py::TestIncomingState::test_gradcheck",
    ),
    "a lost second derivative": Fault(
        "cmab_kernels/attention/schema.py", '"value", "out", "lse"', '"value"', f"{SUITE}::test_gradgradcheck"
    ),
    "packed sets that share a batch under vmap": Fault(
        "cmab_kernels/attention/schema.py",
        "return inputs.cu_seqlens is not None",
        "return False",
        "tests/attention/test_suite.py::TestPackedSets::test_vmap",
    ),
    "a merge without its gradient": Fault(
        "cmab_kernels/attention/state.py",
        "weight = (lse - top).exp()",
        "weight = (lse - top).exp().detach()",
        f"{STATE}::test_merge_has_gradients_through_out_and_lse",
    ),
    "a removal that is broadcast over another batch": Fault(
        "cmab_kernels/attention/state.py",
        "if state.out.shape != part.out.shape:",
        "if state.out.dim() != part.out.dim():",
        "tests/nn/test_cmab_stack.py::test_the_latents_of_every_block",
    ),
    "a removal that is reliable too long": Fault(
        "cmab_kernels/attention/state.py",
        "left >= eps**0.5",
        "left >= eps",
        f"{STATE}::test_the_formula_flags_what_cancelled",
    ),
    "a batch that shares its neighbour's mask": Fault(
        "cmab_kernels/attention/reference.py",
        "key.masked_fill(ignore[..., None], 0.0)",
        "key.masked_fill(ignore[:1, ..., None], 0.0)",
        "tests/attention/test_reference.py::test_nothing_that_is_ignored_leaks",
    ),
    "a packed set with a key of the next": Fault(
        "cmab_kernels/attention/reference.py",
        "(position >= cu_seqlens[1:, None])",
        "(position > cu_seqlens[1:, None])",
        "tests/attention/test_reference.py::test_packed_sets_equal_each_set_alone",
    ),
    "a gradient of the scores without delta": Fault(
        "cmab_kernels/attention/reference.py",
        " - (dout * out).sum(-1, keepdim=True) +",
        " +",
        "tests/attention/test_reference.py::test_gradient_formula_against_autograd",
    ),
    "a prefix without its last chunk": Fault(
        "cmab_kernels/attention/prefix/reference.py",
        "beyond = (chunk > torch",
        "beyond = (chunk >= torch",
        f"{PREFIX}::TestPrefixStates::test_accuracy -k reference",
    ),
    "blocks whose gradients replace each other": Fault(
        "cmab_kernels/attention/projected/reference.py",
        "dnormed = dnormed + dprojected",
        "dnormed = dprojected",
        f"{PROJECTED}::TestStackedBlocks::test_gradgradcheck",
    ),
}

IN_TRITON = {
    "a dropped last block, in Triton": Fault(
        "cmab_kernels/attention/triton/forward.py",
        "last if RAGGED else whole,",
        "whole,",
        f"{KERNELS}::test_shapes",
    ),
    "a missing rescale, in Triton": Fault(
        "cmab_kernels/attention/triton/forward.py",
        "total = total * fade +",
        "total = total +",
        f"{KERNELS}::test_shapes",
    ),
    "base 2 for base e, in Triton": Fault(
        "cmab_kernels/attention/triton/forward.py",
        "log2_scale = (scale_ * LOG2_E).to(DTYPE)",
        "log2_scale = scale_.to(DTYPE)",
        f"{KERNELS}::test_shapes",
    ),
    "runs that are merged without the incoming state": Fault(
        "cmab_kernels/attention/triton/forward.py",
        " + tl.sum(tl.exp(state - peak), 0))",
        ")",
        f"{KERNELS}::test_states",
    ),
    "a maximum in another unit": Fault(
        "cmab_kernels/attention/triton/forward.py",
        "peak_score = offset.to(tl.float64) / factor.to(tl.float64) * scale",
        "peak_score = peak.to(tl.float64) * scale",
        "tests/attention/test_triton_large.py",
    ),
    "a gradient of the scores without delta, in Triton": Fault(
        "cmab_kernels/attention/triton/backward.py",
        "slopes = weights * (dweights - delta)",
        "slopes = weights * dweights",
        f"{KERNELS}::test_shapes",
    ),
    "= for +=, in Triton": Fault(
        "cmab_kernels/attention/triton/backward.py",
        "dq += product(slopes, keys, OPERAND, PRECISION, HIDDEN)",
        "dq = product(slopes, keys, OPERAND, PRECISION, HIDDEN)",
        f"{KERNELS}::test_shapes",
    ),
    "a gradient of an ignored key, in Triton": Fault(
        "cmab_kernels/attention/triton/backward.py",
        "tile = tl.where(keep[:, None], tile, 0.0)",
        "tile = tile + 0.0",
        f"{KERNELS}::test_ignored_keys_have_no_gradient_of_a_bad_query",
    ),
    "a lost gradient through lse, in Triton": Fault(
        "cmab_kernels/attention/triton/row_terms.py",
        "term -= tl.load(dlse + start, mask=inside, other=0.0)",
        "term -= 0.0",
        f"{KERNELS}::test_shapes",
    ),
    "a residue of lse at 1e38": Fault(
        "cmab_kernels/attention/triton/row_terms.py",
        "rest = tl.where(tl.abs(rest) > tl.abs(logarithm) * RESOLUTION, rest, 0.0) * LOG2_E",
        "rest = rest * LOG2_E",
        "tests/attention/test_triton_large.py",
    ),
    "a weight from a logarithm beyond 2^52": Fault(
        "cmab_kernels/attention/triton/row_terms.py",
        "far = (tl.abs(logarithm) >= BEYOND)",
        "far = (tl.abs(logarithm) < 0)",
        "tests/attention/test_triton_large.py::test_a_lone_largest_score_has_weight_one",
    ),
    "a removal of nothing that takes something": Fault(
        "cmab_kernels/attention/triton/removal.py",
        "gap = removed - tl.where(nothing_there",
        "gap = tl.where(nothing_removed, 0.0, removed) - tl.where(nothing_there",
        f"{KERNELS}::test_removal",
    ),
    "a gradient of one run without the scale": Fault(
        "cmab_kernels/attention/triton/backward.py",
        "torch.mul(shares, scale, out=dquery)",
        "dquery.copy_(shares)",
        f"{KERNELS}::test_shapes",
    ),
    "shares of runs that replace each other": Fault(
        "cmab_kernels/attention/triton/row_terms.py",
        "total += tl.sum(tl.load(shares",
        "total = tl.sum(tl.load(shares",
        f"{KERNELS}::test_many_runs",
    ),
    "a run that begins where the set does": Fault(
        "cmab_kernels/attention/triton/runs.py",
        "start = tl.minimum(first + tl.minimum(run, count_runs(last - first, most_runs)) * length, last)",
        "start = tl.minimum(first + run * 0, last)",
        f"{KERNELS}::test_several_runs",
    ),
    "offsets that fall and are taken": Fault(
        "cmab_kernels/attention/triton/runs.py", "bad |= falls > 0", "bad |= falls < 0", f"{KERNELS} -k offsets"
    ),
    "a 32-bit offset, in Triton": Fault(
        "cmab_kernels/runtime/triton_rows.py",
        "rows = tl.arange(0, ROWS).to(tl.int64) * strides[2]",
        "rows = tl.arange(0, ROWS) * strides[2].to(tl.int32)",
        "tests/attention/test_cubin.py -k 'strides or compiled'",
    ),
    "a mask a key late, in Triton": Fault(
        "cmab_kernels/runtime/triton_rows.py", "keep = keys < last", "keep = keys <= last", f"{KERNELS}::test_shapes"
    ),
    "columns past the last that are read": Fault(
        "cmab_kernels/runtime/triton_rows.py",
        "columns = column + tl.arange(0, pointers.shape[1])[None, :] < WIDTH",
        "columns = column + tl.arange(0, pointers.shape[1])[None, :] <= WIDTH",
        f"{KERNELS}::test_shapes",
    ),
    "a prefix without its last chunk, in Triton": Fault(
        "cmab_kernels/attention/prefix/triton/forward.py",
        "[None, :] <= prefix[:, None])",
        "[None, :] < prefix[:, None])",
        f"{PREFIX_KERNELS}::test_states_and_gradients",
    ),
    "a base that outweighs its share": Fault(
        "cmab_kernels/attention/prefix/triton/forward.py",
        "base_out * (base_weight * share)[:, None]",
        "base_out * base_weight[:, None]",
        f"{PREFIX_KERNELS}",
    ),
    "offsets of a chunk counted from the first row": Fault(
        "cmab_kernels/attention/projected/triton/chunks.py",
        "(offsets - start).clamp(",
        "offsets.clamp(",
        f"{PROJECTED_KERNELS}::test_chunks",
    ),
    "invalid offsets that are valid in a chunk": Fault(
        "cmab_kernels/attention/projected/triton/chunks.py",
        "checked[:-1].long() + checked[-1] * N",
        "checked[:-1].long()",
        f"{PROJECTED_KERNELS}::test_bad_offsets_make_everything_nan",
    ),
    "a gradient of the queries from the last chunk alone": Fault(
        "cmab_kernels/attention/projected/triton/chunks.py",
        "dquery = share if dquery is None else dquery.add_(share)",
        "dquery = share",
        f"{PROJECTED_KERNELS}::test_chunks",
    ),
    "a gradient of the projections from the last chunk alone": Fault(
        "cmab_kernels/attention/projected/triton/projections.py",
        "total + tl.load(pointers, mask=there & (more != 0), other=0.0)",
        "total",
        f"{PROJECTED_KERNELS}::test_chunks",
    ),
    "a mean along rows that counts the bias": Fault(
        "cmab_kernels/attention/projected/triton/projections.py",
        "(unbiased - vector(bias, M, TILE, dnormed.dtype, start)[None, :])",
        "unbiased",
        f"{PROJECTED_KERNELS}::test_shapes",
    ),
    "a tile of columns that no program projects": Fault(
        "cmab_kernels/attention/projected/triton/projections.py",
        "for start in range(part * TILE, M, parts * TILE):",
        "for start in range(part * TILE, M, (parts + 1) * TILE):",
        f"{PROJECTED_KERNELS}::test_columns_are_divided",
    ),
    "projected keys rounded to a half type": Fault(
        "cmab_kernels/runtime/triton_products.py",
        "result = tl.dot(a, high, tl.where(rest > -3.4e38, rest, -3.4e38))",
        "result = tl.dot(a, high)",
        f"{PROJECTED_KERNELS}::test_half_products",
    ),
}

FAULTS = {**IN_CPP, **IN_PYTHON, **IN_TRITON}
