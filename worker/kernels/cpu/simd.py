"""A 16-lane float32 vector and raw memory access for numba code, as LLVM intrinsics.

Addresses are int64. Where an element type matters, a `tag` argument carries it in its own type: float32, or uint16 for
bfloat16, which numba lacks. LLVM splits the vectors where the machine's registers are narrower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import torch
from llvmlite import ir
from numba import njit
from numba.core import config, types
from numba.extending import intrinsic, models, register_model

LANES = 16
VECTOR_BYTES = 4 * LANES
BF16 = np.uint16(0)
F32 = np.float32(0)

I16, I32, I64, FLOAT = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
VECTOR = ir.VectorType(FLOAT, LANES)
INTS = ir.VectorType(I32, LANES)


def kernel(function: Callable[..., Any]) -> Any:
    """Compiles a function for use by other compiled functions; integer division does not check for zero."""
    options: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}  # nobody calls it from Python
    return njit(error_model="numpy", **options)(function)


def instruction(function: Callable[..., Any]) -> Any:
    """Makes a function that emits LLVM code callable from compiled functions."""
    return intrinsic(function)


class BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite does not name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


class VectorType(types.Type):
    """The numba type of a vector."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


vector = VectorType()


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, VECTOR)  # type: ignore[no-untyped-call]


def cpu_has(*features: str) -> bool:
    """Whether the machine that numba compiles for has all of these LLVM features."""
    name, chosen = getattr(config, "CPU_NAME", None), getattr(config, "CPU_FEATURES", None)
    if chosen is not None:
        present = {feature[1:] for feature in chosen.split(",") if feature.startswith("+")}
    elif name in (None, "host"):
        present = {feature for feature, there in llvm.get_host_cpu_features().items() if there}
    else:
        present = set()
    return present.issuperset(features)


def is_pair(tag_type: Any) -> bool:
    """Whether elements are bfloat16, two of them in 32 bits."""
    return bool(tag_type == types.uint16)


def tag_of(dtype: torch.dtype) -> Any:
    """The tag value of a torch dtype."""
    return {torch.float32: F32, torch.bfloat16: BF16}[dtype]


def pointer(builder: ir.IRBuilder, address: ir.Value, pointee: ir.Type) -> ir.Value:
    """An address as a typed pointer."""
    return builder.inttoptr(address, pointee.as_pointer())


def load(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int) -> ir.Value:
    """Loads a value of LLVM type `kind`."""
    return builder.load(pointer(builder, address, kind), align=align)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, align: int) -> None:
    """Stores a value."""
    builder.store(value, pointer(builder, address, value.type), align=align)


def splat(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """The scalar in every lane."""
    kind = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return builder.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(INTS, [0] * LANES))


def constant(value: float) -> ir.Constant:
    """A vector constant with the same value in every lane."""
    return ir.Constant(VECTOR, [value] * LANES)


def call(builder: ir.IRBuilder, name: str, kind: ir.Type, *args: ir.Value) -> ir.Value:
    """Calls an LLVM intrinsic by its full name."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(kind, [a.type for a in args]), name)
    return builder.call(function, args)


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c, fused where the machine can."""
    return call(builder, "llvm.fmuladd.v16f32", VECTOR, a, b, c)


def bits(builder: ir.IRBuilder, value: ir.Value, kind: ir.Type = INTS) -> ir.Value:
    """The same bits as another type."""
    return builder.bitcast(value, kind)


def widen(builder: ir.IRBuilder, halves: ir.Value) -> ir.Value:
    """16 bfloat16 as 16-bit integers to float32."""
    shift = ir.Constant(INTS, [16] * LANES)
    return bits(builder, builder.shl(builder.zext(halves, INTS), shift), VECTOR)


def narrow(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Float32 to bfloat16 as 16-bit integers, rounded to nearest even; NaN stays NaN."""
    if cpu_has("avx512bf16", "avx512vl"):
        return bits(builder, builder.fptrunc(value, ir.VectorType(BFloat(), LANES)), ir.VectorType(I16, LANES))
    raw = bits(builder, value)
    sixteen, one = ir.Constant(INTS, [16] * LANES), ir.Constant(INTS, [1] * LANES)
    odd = builder.and_(builder.lshr(raw, sixteen), one)
    rounded = builder.add(builder.add(raw, odd), ir.Constant(INTS, [0x7FFF] * LANES))
    quiet = builder.or_(raw, ir.Constant(INTS, [0x400000] * LANES))
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded)
    return builder.trunc(builder.lshr(chosen, sixteen), ir.VectorType(I16, LANES))


def exp2_vector(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """2**x by splitting off the integer part and a polynomial (Taylor of 2**f on [-0.5, 0.5]); 0 below -126."""
    clamped = builder.select(builder.fcmp_ordered("<", x, constant(-126.0)), constant(-126.0), x)
    magic = constant(12582912.0)  # 1.5 * 2**23: adding it rounds to an integer
    shifted = builder.fadd(clamped, magic)
    fraction = builder.fsub(clamped, builder.fsub(shifted, magic))
    ln2 = 0.6931471805599453
    terms = [1.0]
    for order in range(1, 8):
        terms.append(terms[-1] * ln2 / order)
    value = constant(terms[7])
    for order in range(6, -1, -1):
        value = multiply_add(builder, value, fraction, constant(terms[order]))
    exponent = builder.shl(bits(builder, shifted), ir.Constant(INTS, [23] * LANES))
    scaled = bits(builder, builder.add(bits(builder, value), exponent), VECTOR)
    return builder.select(builder.fcmp_ordered("<", x, constant(-126.0)), constant(0.0), scaled)


def _unary(name: str, emit: Callable[[ir.IRBuilder, ir.Value], ir.Value], result: Any) -> Any:
    """An intrinsic of one vector."""

    def typed(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            return emit(builder, args[0])

        return result(x), codegen

    typed.__name__ = name
    return instruction(typed)


def _binary(name: str, emit: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]) -> Any:
    """An intrinsic of two vectors."""

    def typed(typingctx: Any, x: Any, y: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            return emit(builder, args[0], args[1])

        return vector(x, y), codegen

    typed.__name__ = name
    return instruction(typed)


def _larger(builder: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


def _fold(combine: Callable[[ir.IRBuilder, ir.Value, ir.Value], ir.Value]) -> Any:
    """Combines all lanes, halving each time: an order that does not depend on the machine."""

    def emit(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
        width = LANES
        while width > 1:
            width //= 2
            undefined = ir.Constant(x.type, ir.Undefined)
            kind = ir.VectorType(I32, width)
            low = builder.shuffle_vector(x, undefined, ir.Constant(kind, list(range(width))))
            high = builder.shuffle_vector(x, undefined, ir.Constant(kind, list(range(width, 2 * width))))
            x = combine(builder, low, high)
        return builder.extract_element(x, I32(0))

    return emit


vadd = _binary("vadd", lambda builder, x, y: builder.fadd(x, y))
vsub = _binary("vsub", lambda builder, x, y: builder.fsub(x, y))
vmul = _binary("vmul", lambda builder, x, y: builder.fmul(x, y))
vdiv = _binary("vdiv", lambda builder, x, y: builder.fdiv(x, y))
vmax = _binary("vmax", _larger)
vmin = _binary("vmin", lambda builder, x, y: builder.select(builder.fcmp_ordered("<", x, y), x, y))
vexp2 = _unary("vexp2", exp2_vector, lambda x: vector(x))
vsum = _unary("vsum", _fold(lambda b, x, y: b.fadd(x, y)), lambda x: types.float32(x))
vlargest = _unary("vlargest", _fold(_larger), lambda x: types.float32(x))
vsplat = _unary("vsplat", splat, lambda x: vector(types.float32))


@instruction
def vfma(typingctx: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return multiply_add(builder, *args)

    return vector(x, y, z), codegen


@instruction
def vlimit(typingctx: Any, x: Any, low: Any, high: Any, fill: Any) -> Any:
    """Lanes i with low <= i < high keep x, others get `fill`."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value, low, high, fill = args
        lane = ir.Constant(INTS, list(range(LANES)))
        above = builder.icmp_signed(">=", lane, splat(builder, builder.trunc(low, I32)))
        below = builder.icmp_signed("<", lane, splat(builder, builder.trunc(high, I32)))
        return builder.select(builder.and_(above, below), value, splat(builder, fill))

    return vector(x, types.int64, types.int64, types.float32), codegen


@instruction
def vload(typingctx: Any, tag: Any, address: Any) -> Any:
    """16 elements, as float32."""
    pair = is_pair(tag)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if pair:
            return widen(builder, load(builder, args[1], ir.VectorType(I16, LANES), 2))
        return load(builder, args[1], VECTOR, 4)

    return vector(tag, types.int64), codegen


@instruction
def vstore(typingctx: Any, tag: Any, value: Any, address: Any) -> Any:
    """Stores 16 elements, rounded to their type."""
    pair = is_pair(tag)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if pair:
            store(builder, narrow(builder, args[1]), args[2], 2)
        else:
            store(builder, args[1], args[2], 4)
        return context.get_dummy_value()

    return types.void(tag, vector, types.int64), codegen


def _mask(builder: ir.IRBuilder, count: ir.Value) -> ir.Value:
    lane = ir.Constant(INTS, list(range(LANES)))
    return builder.icmp_signed("<", lane, splat(builder, builder.trunc(count, I32)))


@instruction
def vload_first(typingctx: Any, tag: Any, address: Any, count: Any) -> Any:
    """The first `count` of 16 elements, as float32, the others 0; touches no memory behind them."""
    pair = is_pair(tag)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        mask = _mask(builder, args[2])
        kind = ir.VectorType(I16, LANES) if pair else VECTOR
        name = "llvm.masked.load.v16i16.p0" if pair else "llvm.masked.load.v16f32.p0"
        zeros = ir.Constant(kind, [0] * LANES if pair else [0.0] * LANES)
        source = pointer(builder, args[1], kind)
        value = call(builder, name, kind, source, mask, zeros)
        return widen(builder, value) if pair else value

    return vector(tag, types.int64, types.int64), codegen


@instruction
def vstore_first(typingctx: Any, tag: Any, value: Any, address: Any, count: Any) -> Any:
    """Stores the first `count` of 16 elements, rounded to their type."""
    pair = is_pair(tag)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = narrow(builder, args[1]) if pair else args[1]
        name = "llvm.masked.store.v16i16.p0" if pair else "llvm.masked.store.v16f32.p0"
        target = pointer(builder, args[2], value.type)
        call(builder, name, ir.VoidType(), value, target, _mask(builder, args[3]))
        return context.get_dummy_value()

    return types.void(tag, vector, types.int64, types.int64), codegen


def _loader(name: str, kind: ir.Type, align: int, result: Any, grow: bool = False) -> Any:
    def typed(typingctx: Any, address: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            value = load(builder, args[0], kind, align)
            return builder.sext(value, I64) if grow else value

        return result(types.int64), codegen

    typed.__name__ = name
    return instruction(typed)


def _storer(name: str, kind: ir.Type, align: int, taken: Any) -> Any:
    def typed(typingctx: Any, value: Any, address: Any) -> Any:
        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            value = builder.trunc(args[0], kind) if args[0].type == I64 and kind != I64 else args[0]
            store(builder, value, args[1], align)
            return context.get_dummy_value()

        return types.void(taken, types.int64), codegen

    typed.__name__ = name
    return instruction(typed)


load_i64 = _loader("load_i64", I64, 8, types.int64)
load_i32 = _loader("load_i32", I32, 4, types.int64, grow=True)
load_i16 = _loader("load_i16", I16, 2, types.int64, grow=True)
load_f32 = _loader("load_f32", FLOAT, 4, types.float32)
store_i64 = _storer("store_i64", I64, 8, types.int64)
store_i32 = _storer("store_i32", I32, 4, types.int64)
store_i16 = _storer("store_i16", I16, 2, types.int64)
store_f32 = _storer("store_f32", FLOAT, 4, types.float32)


@instruction
def prefetch(typingctx: Any, address: Any) -> Any:
    """Asks for the cache line at an address, which need not be readable, to come to the second-level cache."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        line = pointer(builder, args[0], ir.IntType(8))
        call(builder, "llvm.prefetch.p0", ir.VoidType(), line, I32(0), I32(2), I32(1))
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@instruction
def per_word(typingctx: Any, tag: Any) -> Any:
    """Elements in 32 bits: 2 for bfloat16, 1 for float32."""
    count = 2 if is_pair(tag) else 1

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return I64(count)

    return types.int64(tag), codegen


@instruction
def float_of_bits(typingctx: Any, value: Any) -> Any:
    """The float32 whose bits are the low half of an int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], I32), FLOAT)

    return types.float32(types.int64), codegen
