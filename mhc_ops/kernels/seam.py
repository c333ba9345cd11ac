"""The launch of an operator's row programs, its projection programs, or both side by side."""

import triton
import triton.language as tl

from .pack import pack_program
from .pdl import after_previous
from .project import project_few_program, project_program
from .row import row_program


@triton.jit(
    do_not_specialize=["T", "project_programs"],
    do_not_specialize_on_alignment=["post_layer_mix", "comb_res_mix", "pre_mix"],
)
def seam_kernel(
    residual,  # [T, 4, H] bf16, or None: every R'_j is sublayer_out, the model's entry
    sublayer_out,  # [T, H] bf16, or None: residual already is R'
    post_layer_mix,  # [T, 4] fp32, or None without post
    comb_res_mix,  # [T, 4, 4] fp32, or None without post
    pre_mix,  # [T, 4] fp32, or None: u is stream 0
    norm_weight,  # [H] bf16 or fp32, or None: layer_input is u
    residual_out,  # [T, 4, H] bf16, or None. None as layer_input and aux: no row programs
    layer_input,  # [T, H] bf16, or e4m3 with layer_input_scale; or None
    layer_input_scale,  # [T, H / 32] fp32 or uint8, see row.py; or None
    aux,  # [T, H] bf16, or None
    squares,  # [T] fp32: sum R'^2 from row programs launched alone; None: projection programs
    weight,  # [24, K] fp32 or [72, K] bf16, see project.py; or None: no projection programs
    partials,  # [splits, T, 32] fp32: 24 projections, sum R'^2 unless in squares; or None
    fn,  # [24, K] fp32, to be packed for the next launch by programs after the rows'; or None
    packed,  # [72, K] bf16, see pack.py; or None
    T,
    project_programs,
    norm_eps,
    H: tl.constexpr,
    K: tl.constexpr,  # 4 * H, or H without residual
    SPLITS: tl.constexpr,
    COLS: tl.constexpr,  # columns of a projection program: a multiple of BLOCK_H
    BLOCK_T: tl.constexpr,  # its tokens; fewer than 16: project_few_program
    BLOCK_H: tl.constexpr,  # its columns a step, divides H
    VENDOR: tl.constexpr,
    FENCE: tl.constexpr,
    STAGES: tl.constexpr,
    ROW_BLOCK: tl.constexpr,  # columns that a row program takes at a time
    BLOCK_K: tl.constexpr,  # columns of a packing program
    PDL: tl.constexpr,
):
    program = tl.program_id(0)
    ROWS: tl.constexpr = residual_out is not None or layer_input is not None or aux is not None
    # The first ones project: they have the longer way, and the gates' launch waits for them.
    if weight is not None and (not ROWS or program < project_programs):
        if BLOCK_T < 16:
            project_few_program(
                residual,
                sublayer_out,
                post_layer_mix,
                comb_res_mix,
                weight,
                partials,
                program // SPLITS,
                program % SPLITS,
                T,
                H,
                K,
                COLS,
                BLOCK_T,
                VENDOR,
                PDL,
            )
        else:
            project_program(
                residual,
                sublayer_out,
                post_layer_mix,
                comb_res_mix,
                weight,
                partials,
                program // SPLITS,
                program % SPLITS,
                T,
                H,
                K,
                COLS,
                BLOCK_T,
                BLOCK_H,
                squares is None,
                VENDOR,
                FENCE,
                STAGES,
                PDL,
            )
    elif packed is not None and program >= T:
        after_previous(PDL)
        pack_program(fn, packed, program - T, K, BLOCK_K, VENDOR)
    elif ROWS:
        row_program(
            residual,
            sublayer_out,
            post_layer_mix,
            comb_res_mix,
            pre_mix,
            norm_weight,
            residual_out,
            layer_input,
            layer_input_scale,
            aux,
            squares,
            program - project_programs,
            norm_eps,
            H,
            VENDOR,
            ROW_BLOCK,
            PDL,
        )
