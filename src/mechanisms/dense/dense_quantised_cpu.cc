// dense_quantised on the vector units: panels of weights as numbers in scratch, then as dense with many rows.
#include "dense.h"
#include "dense_panels.h"

namespace linnet::LINNET_ISA {
namespace {

LINNET_INLINE RowRounding rounding_of(const DenseQuantisedArgs& args) {
  return args.rounding == QuantisedRounding::int16  ? RowRounding::int16
         : args.rounding == QuantisedRounding::int8 ? RowRounding::int8
                                                    : RowRounding::none;
}

// One block (16 outputs, 32 inputs) as numbers: panel[k * kColumns + r].
template <class T>
void unpack_block(const DenseQuantisedArgs& args, int64_t p, int64_t g, T* panel) {
  const uint8_t* block = args.codes.at<const uint8_t>(p, g);
  const bool eight = args.bits == QuantisedBits::eight, offset = args.offset.given();
  const T zero = offset ? T(0) : eight ? T(128) : T(8);
  const int64_t at = p * args.scale.stride[0] + g * args.scale.stride[1];
  const int64_t base_at = offset ? p * args.offset.stride[0] + g * args.offset.stride[1] : 0;
  if constexpr (sizeof(T) == 8) {
    for (int k = 0; k < 32; ++k) {
      for (int r = 0; r < 16; ++r) {
        const int code =
            eight ? block[k / 4 * 64 + r * 4 + k % 4] : block[k % 16 / 4 * 64 + r * 4 + k % 4] >> (k / 16 * 4) & 15;
        const T scale = static_cast<const double*>(args.scale.data)[at + r];
        panel[k * kColumns + r] =
            offset ? scale * code + static_cast<const double*>(args.offset.data)[base_at + r] : scale * (code - zero);
      }
    }
  } else {
    using X = Vec<T>;
    for (int r = 0; r < 16; r += X::W) {
      const vf scale = load_weights<T>(args.scale, at + r, X::W);
      const vf base = offset ? load_weights<T>(args.offset, base_at + r, X::W) : X::zero();
      const auto number = [&](vu32 codes) {
        const vf code = from_int(reinterpret_cast<vi32>(codes)) - X::broadcast(zero);
        return offset ? fma(scale, code, base) : scale * code;
      };
      for (int j = 0; j < (eight ? 8 : 4); ++j) {
        vu32 v;
        __builtin_memcpy(&v, block + j * 64 + r * 4, sizeof v);
        for (int i = 0; i < 4; ++i) {
          if (eight) {
            X::store(panel + (4 * j + i) * kColumns + r, number(v >> (8 * i) & 255u));
          } else {
            X::store(panel + (4 * j + i) * kColumns + r, number(v >> (8 * i) & 15u));
            X::store(panel + (16 + 4 * j + i) * kColumns + r, number(v >> (8 * i + 4) & 15u));
          }
        }
      }
    }
  }
}

template <class T, class E>
void forward(const DenseQuantisedArgs& args, const DenseOut& out, const Launch& launch) {
  Arena arena(launch.workspace);
  const RowRounding rounding = rounding_of(args);
  const Scratch<T> scratch = Scratch<T>::cut(arena, args.x, rounding, launch.workers);
  const int64_t rows = args.x.size[0] * args.x.size[1];
  if (rows == 0) return;
  const Rows<T> x = rows_of<T>(args.x, rounding, scratch, launch);
  const auto pack = [&](int64_t o, int n, int64_t i, int depth, T* panel) {
    for (int64_t g = i / 32; g < (i + depth) / 32; ++g) {
      for (int r = 0; r < n; r += 16) unpack_block<T>(args, (o + r) / 16, g, panel + (g * 32 - i) * kColumns + r);
    }
  };
  multiply_panels<T, E>(x, rows, args.x.size[2], out.out.size[2], args.x.size[1], args.bias, out.out, scratch, launch, pack);
}

}  // namespace

void dense_quantised_forward(const DenseQuantisedArgs& args, const DenseOut& out, const Launch& launch) {
  by_dtype(args.x.dtype, [&]<class T, class E>() { forward<T, E>(args, out, launch); });
}
int64_t dense_quantised_workspace(const DenseQuantisedArgs& args, Pass, int workers) {
  return by_dtype(args.x.dtype, [&]<class T, class E>() {
    Arena arena;
    Scratch<T>::cut(arena, args.x, rounding_of(args), workers);
    return arena.used();
  });
}

}  // namespace linnet::LINNET_ISA
