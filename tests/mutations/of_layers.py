"""Faults of the fused layers."""

from __future__ import annotations

from .fault import Fault

SUITE = "tests/layers/test_suite.py"
BLOCK = "tests/layers/stack/test_native.py"
RESIDUAL = "tests/nn/test_residual.py"
REFERENCE = "tests/layers/test_reference.py"
KERNELS = "tests/layers/test_triton.py"
NARROW = "tests/test_instruction_sets.py::test_accuracy"

IN_CPP = {
    "columns past the last in a norm": Fault(
        "csrc/linear/norm.h",
        "const V apart = within(width, d, Tiles<T>::load_at(rows, first + r, d) - mean[r]);",
        "const V apart = Tiles<T>::load_at(rows, first + r, d) - mean[r];",
        f"{SUITE}::TestGeglu::test_accuracy -k native",
    ),
    "a norm's gradient without its direction": Fault(
        "csrc/linear/norm.h",
        "- mean[r] - unit(r, d) * along[r])",
        "- mean[r] - T(0) * along[r])",
        f"{SUITE}::TestGeglu::test_accuracy -k native",
    ),
    "= for += of a residual": Fault(
        "csrc/linear/products.h",
        "store(at, add ? load<V>(at) + sum : sum);",
        "store(at, sum);",
        f"{SUITE}::TestGeglu::test_accuracy -k native",
    ),
    "a last square of a matrix that is not packed": Fault(
        "csrc/linear/products.h",
        "for (int i = 0; i < count; ++i) store(to + (d + i) * stride + c, square[i]);",
        "for (int i = 0; i + 1 < count; ++i) store(to + (d + i) * stride + c, square[i]);",
        f"{SUITE}::TestGeglu::test_accuracy -k native",
    ),
    "ignored rows that are read": Fault(
        "csrc/linear/tiles.h",
        "if (ignored && ignored[row * ignored_stride])",
        "if (false && ignored[row * ignored_stride])",
        f"{SUITE}::TestAttentionLayer::test_masks -k native",
    ),
    "a gate's slope without its density": Fault(
        "csrc/linear/activation.h",
        "return at.below + (at.density == V{} ? V{} : x * at.density);",
        "return at.below + V{} * x;",
        f"{SUITE}::TestGeglu::test_accuracy -k native",
    ),
    "a gradient of an output projection in memory of another shape": Fault(
        "csrc/layers/attention_layer.cpp",
        "packed(kBackward ? take.packed(in.width, in.heads * in.value_width)",
        "packed(kBackward ? take.packed(in.heads * in.value_width, in.width)",
        "tests/layers/test_widths.py::test_heads_may_be_much_narrower_than_the_layer",
    ),
    "block latents of one set alone": Fault(
        "csrc/layers/latent_block.cpp",
        "+ row % in.block_latents * bytes, bytes);",
        "+ 0 * row * bytes, bytes);",
        f"{BLOCK}::test_one_call_is_its_operators",
    ),
    "a gradient that misses the gate": Fault(
        "csrc/layers/feed_forward.cpp",
        "in_.width, nullptr, part > 0, tiles.dnormed);",
        "in_.width, nullptr, false, tiles.dnormed);",
        f"{SUITE}::TestGeglu::test_accuracy -k native",
    ),
    "a normed residual that sends its gradient past the norm": Fault(
        "csrc/linear/driver.h",
        "kernel.add_tile(drows, count, parameters.width, dnormed);",
        "",
        f"{SUITE}::TestNormedGeglu::test_accuracy -k native",
    ),
    "a normed residual whose gradient counts twice": Fault(
        "csrc/linear/driver.h",
        "clear(kernel, count, parameters.width, drows);",
        "",
        f"{SUITE}::TestNormedGeglu::test_accuracy -k native",
    ),
    "an attention layer that adds to its input": Fault(
        "csrc/layers/attention_layer.cpp",
        "if (in.residual == Residual::kNormed) norm.load(kernel, in.dtype, in.norm);",
        "",
        f"{SUITE}::TestNormedAttentionLayer::test_accuracy -k native",
    ),
    "block latents whose gradient goes past their norm": Fault(
        "csrc/layers/block_stack.cpp",
        "return in_.reads || in_.blocks[0].residual == Residual::kNormed;",
        "return in_.reads;",
        f"{BLOCK}::test_one_call_is_its_operators",
    ),
    "threads that do not wait for each other": Fault(
        "csrc/layers/crew.h",
        "if (has_sets(sets)) return;\n#pragma omp barrier",
        "if (sets >= 0) return;\n#pragma omp barrier",
        f"{BLOCK}::test_strides_and_threads_change_no_bit",
    ),
    "columns past the last in a norm, with AVX2": Fault(
        "csrc/linear/norm.h",
        "const V apart = within(width, d, Tiles<T>::load_at(rows, first + r, d) - mean[r]);",
        "const V apart = Tiles<T>::load_at(rows, first + r, d) - mean[r];",
        f"{NARROW} -k 'avx2 and layers'",
        "avx2",
    ),
    "a norm's gradient of its weight without the deviation": Fault(
        "csrc/linear/norm.h",
        "of_weight += dy * within(width, d, (load<V>(row_of<T>(rows, row) + d) - found.mean) * found.scale);",
        "of_weight += dy * within(width, d, load<V>(row_of<T>(rows, row) + d) - found.mean);",
        f"{SUITE}::TestGeglu::test_accuracy -k native",
    ),
    "a folded norm without its scale": Fault(
        "csrc/linear/fold.h", "to[c] = each * by[c];", "to[c] = each;", f"{BLOCK}::test_one_call_is_its_operators"
    ),
    "= for += of a folded shift's gradient": Fault(
        "csrc/linear/fold.h",
        "of_shift[c] += of_bias * each;",
        "of_shift[c] = of_bias * each;",
        f"{BLOCK}::test_one_call_is_its_operators",
    ),
    "gradients of the first piece of the rows alone": Fault(
        "csrc/linear/tiles.h",
        "for (int piece = 0; piece < pieces; ++piece)",
        "for (int piece = 0; piece < (pieces > 0); ++piece)",
        f"{SUITE}::TestGeglu::test_accuracy -k native",
    ),
    "a bias of the first vector of columns for all": Fault(
        "csrc/linear/products.h",
        "load<V>(bias + c * kLanes) : V{};",
        "load<V>(bias) : V{};",
        f"{SUITE}::TestAttentionLayer::test_accuracy -k native",
    ),
    "queries of the first set alone": Fault(
        "csrc/layers/block_stack.cpp",
        "for (int64_t b = 1; b < n.copies(); ++b) std::memcpy(",
        "for (int64_t b = n.copies(); b < n.copies(); ++b) std::memcpy(",
        f"{BLOCK}::test_one_call_is_its_operators",
    ),
    "= for += over the batch": Fault(
        "csrc/layers/block_stack.cpp",
        "if (i) kernel.add_tile(tiles.part, count, width, tiles.sum);",
        "if (i) kernel.load(n.dtype, from, count, width, nullptr, 0, tiles.sum);",
        f"{BLOCK}::test_one_call_is_its_operators",
    ),
    "latents between blocks that send nothing back": Fault(
        "csrc/layers/block_stack.cpp",
        "if (dbetween && k < n_.depth - 1)",
        "if (dbetween && k >= n_.depth)",
        f"{BLOCK}::test_the_latents_after_every_block",
    ),
    "rows of a second set taken for the first one's": Fault(
        "csrc/layers/projection.h",
        "function(batch * heads * rows + at, done, some);",
        "function(batch * rows + at, done, some);",
        f"{SUITE}::TestAttentionLayer::test_accuracy -k native",
    ),
    "a branch whose gradient replaces the others'": Fault(
        "csrc/layers/projection.h",
        "source_.width, nullptr, i > 0, tiles.dnormed);",
        "source_.width, nullptr, false, tiles.dnormed);",
        f"{SUITE}::TestSelfAttentionLayer::test_accuracy -k native",
    ),
}

IN_PYTHON = {
    "a normed residual whose norm learns nothing, of blocks that do not read": Fault(
        "cmab_kernels/layers/stack/schema.py",
        'range(3 if residual == "normed" else 1, OF_READING)',
        "range(1, OF_READING)",
        f"{BLOCK}::test_only_the_gradients_that_are_needed_are_made",
    ),
    "latents between blocks that nothing has kept": Fault(
        "cmab_kernels/layers/stack/native.py",
        "between=None if given.keep else between",
        "between=between",
        f"{BLOCK}::test_the_latents_after_every_block",
    ),
    "one call for layers of several residuals": Fault(
        "cmab_kernels/nn/cmab/one_call.py",
        'settings = {"num_heads": first.num_heads, "residual": first.residual}',
        'settings = {"num_heads": first.num_heads}',
        f"{RESIDUAL}::test_layers_of_several_residuals",
    ),
    "a layer of the definition that adds to its input": Fault(
        "cmab_kernels/layers/reference.py",
        'return ((normed if residual == "normed" else rows) + F.linear(ACTIVATIONS',
        "return (rows + F.linear(ACTIVATIONS",
        f"{SUITE}::TestNormedGeglu::test_accuracy -k reference",
    ),
    "keys and values that change places in the authors' weights": Fault(
        "cmab_kernels/nn/cmab/official.py",
        'tensor.chunk(2)[part == ["value"]]',
        'tensor.chunk(2)[part != ["value"]]',
        "tests/models/test_official.py::test_a_block",
    ),
    "gradients of weights that samples share": Fault(
        "cmab_kernels/layers/schema.py",
        "loops=lambda inputs: any(inputs.needs[1:])",
        "loops=lambda inputs: False",
        f"{REFERENCE}::test_gradients_of_weights_for_each_sample",
    ),
    "padding that a layer sees": Fault(
        "cmab_kernels/layers/native.py",
        "key_padding_mask=None if mask is None else mask.contiguous().view(-1)",
        "key_padding_mask=None",
        f"{SUITE}::TestAttentionLayer::test_masks -k native",
    ),
    "a layer whose own norm is forgotten for its keys": Fault(
        "cmab_kernels/layers/reference.py",
        "seen, context_norm, context_eps = rows, norm, eps",
        "seen, context_norm = rows, norm",
        f"{SUITE}::TestSelfAttentionLayer::test_accuracy -k reference",
    ),
    "a gate taken for its features": Fault(
        "cmab_kernels/layers/reference.py",
        "features, gate = hidden.chunk(2, dim=-1)",
        "gate, features = hidden.chunk(2, dim=-1)",
        f"{SUITE}::TestGeglu::test_accuracy -k reference",
    ),
}

IN_TRITON = {
    "a normed residual that sends its gradient past the norm, in Triton": Fault(
        "cmab_kernels/layers/triton/residuals.py",
        "if dy is not None and not NORMED:",
        "if dy is not None:",
        f"{KERNELS}::test_feed_forward",
    ),
    "a joined layer that forgets that its residual is normed": Fault(
        "cmab_kernels/layers/triton/projections.py",
        "mean, factor = row_norms(x, row, inside, eps, C, PIECE, NORMED, DTYPE)\n    result",
        "mean, factor = row_norms(x, row, inside, eps, C, PIECE, False, DTYPE)\n    result",
        f"{KERNELS}::test_attention",
    ),
    "columns past the last in a norm, in Triton": Fault(
        "cmab_kernels/attention/projected/triton/row_pieces.py",
        "piece = tl.where(column + tl.arange(0, PIECE)[None, :] < C, piece - mean[:, None], 0.0)",
        "piece = piece - mean[:, None]",
        f"{KERNELS}::test_feed_forward",
    ),
    "heads that lie one in the other": Fault(
        "cmab_kernels/attention/projected/triton/row_pieces.py",
        "first = ((row // length).to(tl.int64) * HEADS * length + row % length) * WIDTH",
        "first = ((row // length).to(tl.int64) * length + row % length) * WIDTH",
        f"{KERNELS}::test_attention",
    ),
    "a norm's gradient without its direction, in Triton": Fault(
        "cmab_kernels/layers/triton/residuals.py",
        " - plain * along[:, None]) * factor",
        ") * factor",
        f"{KERNELS}::test_feed_forward",
    ),
    "a layer without its residual": Fault(
        "cmab_kernels/layers/triton/feed_forward.py",
        "result += residual_rows(given, at, C, C_PAD, NORMED)",
        "result += 0.0",
        f"{KERNELS}::test_feed_forward",
    ),
    "features that send nothing back": Fault(
        "cmab_kernels/layers/triton/feed_forward.py",
        "dnormed += product(dfeatures, feature_weight",
        "dnormed = product(dfeatures, feature_weight",
        f"{KERNELS}::test_feed_forward",
    ),
    "a slope that is NaN where a gate is infinite": Fault(
        "cmab_kernels/layers/triton/activation.py",
        "tl.where(density == 0, 0.0, gates * density)",
        "gates * density",
        f"{KERNELS}::test_an_infinite_feature_sends_back_a_number",
    ),
    "an output projection without its bias": Fault(
        "cmab_kernels/layers/triton/projections.py",
        "result += vector(bias, C, C_PAD, DTYPE)[None, :]",
        "result += 0.0",
        f"{KERNELS}::test_attention",
    ),
    "a gradient of the width of the one before": Fault(
        "cmab_kernels/attention/projected/triton/shares.py",
        "counts[2], widths[2]",
        "counts[2], widths[1]",
        f"{KERNELS}::test_feed_forward",
    ),
    "shares of a gradient that replace each other": Fault(
        "cmab_kernels/attention/projected/triton/shares.py",
        "total += tl.sum(tl.load(",
        "total = tl.sum(tl.load(",
        f"{KERNELS}::test_many_shares",
    ),
}

FAULTS = {**IN_CPP, **IN_PYTHON, **IN_TRITON}
