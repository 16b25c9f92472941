// dense_quantised with x rounded to 8 bits, on the integer dot products of AVX512_VNNI; other calls take the avx512 kernels.
//
// A vector of 64 bytes holds 4 inputs of 16 outputs; one instruction multiplies them by 4 codes of x, broadcast, and adds the
// four products of each output to its 32-bit sum. After the 8 vectors of a group the sums, exact, become floats and are added
// with the group's scales. What the codes' zero adds is taken off beforehand: sums start at -zero (sum of x's codes). Groups
// ascend, so tiles of any shape give the same bits: one row costs what it reads, 18 or 34 bytes for 32 weights, and many rows
// go through register tiles of 6 rows and 2 panels, 12 products for 8 loads, weights of two panels in L1.
//
// Rounding int16: each row of x is two rows of codes, the second of what the first leaves, and their sums are added.
#if defined(LINNET_ISA_avx512)

#undef LINNET_ISA
#define LINNET_ISA avx512_vnni
#pragma GCC target("avx512vnni")

#include "dense.h"
#include "dense_rows.h"

namespace linnet::avx512_vnni {
namespace {

constexpr int64_t kTaskRows = 384, kTaskPanels = 8;

// x in 8 bits, rows in blocks of kBlock so that a tile reads along one pointer: codes [blocks, groups, 8, kBlock, 4], and of
// each group [blocks, groups, kBlock] its scale, the start of its sums, and scale times sum of codes. Rows behind the last are
// not read.
constexpr int kBlock = 6;
struct Codes {
  int8_t* code;
  float* scale;
  int32_t* start;
  float* total;
  int64_t groups;
  int digits;  // rows of codes for each row of x
  static Codes cut(Arena& arena, const DenseQuantisedArgs& args) {
    Codes c;
    const View& x = args.x;
    c.digits = args.rounding == QuantisedRounding::int16 ? 2 : 1;
    const int64_t rows = (c.digits * x.size[0] * x.size[1] + kBlock - 1) / kBlock * kBlock;
    c.groups = x.size[2] / 32;
    c.code = arena.take<int8_t>(rows * x.size[2]);
    c.scale = arena.take<float>(rows * c.groups);
    c.start = arena.take<int32_t>(rows * c.groups);
    c.total = arena.take<float>(rows * c.groups);
    return c;
  }
};

// Row i of codes: the values of a group, whole numbers, and their scale.
LINNET_INLINE void put_codes(const Codes& codes, int64_t i, int64_t g, const float* values, float scale, int zero) {
  const int64_t at = (i / kBlock * codes.groups + g) * kBlock + i % kBlock;
  const __m512i low = reinterpret_cast<__m512i>(to_int(Vec<float>::load(values)));
  const __m512i high = reinterpret_cast<__m512i>(to_int(Vec<float>::load(values + 16)));
  int8_t four[32], *to = codes.code + (at - i % kBlock) * 32 + i % kBlock * 4;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(four), _mm512_maskz_cvtepi32_epi8(kAll16, low));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(four + 16), _mm512_maskz_cvtepi32_epi8(kAll16, high));
#pragma GCC unroll 8
  for (int j = 0; j < 8; ++j) __builtin_memcpy(to + j * 4 * kBlock, four + 4 * j, 4);
  const float whole = sum(Vec<float>::load(values) + Vec<float>::load(values + 16));
  const int32_t total = whole == whole ? static_cast<int32_t>(whole) : 0;  // not a number: nor is its scale
  codes.scale[at] = scale;
  codes.start[at] = -zero * total;
  codes.total[at] = scale * static_cast<float>(total);
}

template <class E>
void round_rows(const View& x, int zero, const Codes& codes, const Launch& launch) {
  const int64_t rows = x.size[0] * x.size[1], each = 16;
  parallel(launch, (rows + each - 1) / each, [&](int64_t task, int) {
    for (int64_t i = task * each; i < task * each + each && i < rows; ++i) {
      const E* from = x.at<const E>(i / x.size[1], i % x.size[1]);
      for (int64_t g = 0; g < codes.groups; ++g) {
        float values[32], rest[32];
        const float scale = group_codes(from + 32 * g, values);
        put_codes(codes, codes.digits * i, g, values, scale, zero);
        if (codes.digits == 1) continue;
        group_rest(from + 32 * g, values, scale, rest);
        const float fine = group_codes(rest, values);
        put_codes(codes, 2 * i + 1, g, values, fine, zero);
      }
    }
  });
}

LINNET_INLINE vf load_scales(const View& view, int64_t panel, int64_t g) {
  const int64_t at = panel * view.stride[0] + g * view.stride[1];
  if (view.dtype == Dtype::f16) return Vec<float>::load(static_cast<const F16*>(view.data) + at);
  if (view.dtype == Dtype::bf16) return Vec<float>::load(static_cast<const Bf16*>(view.data) + at);
  return Vec<float>::load(static_cast<const float*>(view.data) + at);
}

LINNET_INLINE __m512i quad(const int8_t* codes) {
  int32_t four;
  __builtin_memcpy(&four, codes, 4);
  return reinterpret_cast<__m512i>(vi32{} + four);
}
LINNET_INLINE __m512i load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }

// R rows from `row`, P panels from `panel`: sums [R][P] of 16 outputs each.
template <int R, int P, bool kFour>
LINNET_INLINE void tile(const DenseQuantisedArgs& args, const Codes& x, int64_t row, int64_t panel, vf (&sums)[R][P]) {
  constexpr int kBytes = kFour ? 256 : 512;
  const int64_t groups = x.groups;
  const int64_t next_panel = args.codes.stride[0], next_block = groups > 1 ? args.codes.stride[1] : kBytes;
  const uint8_t* block = static_cast<const uint8_t*>(args.codes.data) + panel * next_panel;
  const int64_t start = row / kBlock * groups * kBlock + row % kBlock;  // of the block's groups; R rows stay in one block
  const int8_t* code = x.code + (start - row % kBlock) * 32 + row % kBlock * 4;
  const float *x_scale = x.scale + start, *x_total = x.total + start;
  const int32_t* x_start = x.start + start;
  const __m512i low = _mm512_set1_epi8(15);
  const bool offset = args.offset.given();
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) sums[r][p] = vf{};
  for (int64_t g = 0; g < groups;
       ++g, block += next_block, code += 32 * kBlock, x_scale += kBlock, x_total += kBlock, x_start += kBlock) {
    // One panel lies behind the other: what comes next.
    if constexpr (R <= 2) {
#pragma GCC unroll 8
      for (int line = 0; line < kBytes; line += 64) __builtin_prefetch(block + 4096 + line);
    }
    __m512i acc[R][P];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int p = 0; p < P; ++p) acc[r][p] = reinterpret_cast<__m512i>(vi32{} + x_start[r]);
    if constexpr (kFour) {
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        __m512i first[P], second[P];
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) {
          const __m512i both = load_bytes(block + p * next_panel + 64 * j);
          first[p] = _mm512_and_si512(both, low);
          second[p] = _mm512_and_si512(_mm512_maskz_srli_epi16(~0u, both, 4), low);
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512i a = quad(code + (j * kBlock + r) * 4), b = quad(code + ((4 + j) * kBlock + r) * 4);
#pragma GCC unroll 2
          for (int p = 0; p < P; ++p) {
            acc[r][p] = _mm512_dpbusd_epi32(acc[r][p], first[p], a);
            acc[r][p] = _mm512_dpbusd_epi32(acc[r][p], second[p], b);
          }
        }
      }
    } else {
#pragma GCC unroll 8
      for (int j = 0; j < 8; ++j) {
        __m512i w[P];
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) w[p] = load_bytes(block + p * next_panel + 64 * j);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const __m512i a = quad(code + (j * kBlock + r) * 4);
#pragma GCC unroll 2
          for (int p = 0; p < P; ++p) acc[r][p] = _mm512_dpbusd_epi32(acc[r][p], w[p], a);
        }
      }
    }
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
      const vf scale = load_scales(args.scale, panel + p, g), base = offset ? load_scales(args.offset, panel + p, g) : vf{};
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const vf exact = _mm512_maskz_cvtepi32_ps(kAll16, acc[r][p]);
        sums[r][p] = fma(exact * x_scale[r], scale, sums[r][p]);
        if (offset) sums[r][p] = fma(base, vf{} + x_total[r], sums[r][p]);
      }
    }
  }
}

// Rows of codes [row, row + R), kDigits of them for a row of x.
template <int R, int P, int kDigits, bool kFour, class E>
void store_tile_of(const DenseQuantisedArgs& args, const Codes& x, int64_t row, int64_t panel, const View& out) {
  vf sums[R][P];
  tile<R, P, kFour>(args, x, row, panel, sums);
  for (int p = 0; p < P; ++p) {
    const int64_t column = (panel + p) * 16;
    const int n = static_cast<int>(column + 16 <= out.size[2] ? 16 : out.size[2] - column);
    const vf bias = args.bias.given() ? load_weights<float>(args.bias, column, n) : vf{};
    for (int r = 0; r < R; r += kDigits) {
      const int64_t at = (row + r) / kDigits;
      const vf both = kDigits == 2 ? sums[r][p] + sums[r + kDigits - 1][p] : sums[r][p];
      Vec<float>::store(out.at<E>(at / out.size[1], at % out.size[1], column), both + bias, n);
    }
  }
}

// Rows [row, end) of codes, P panels.
template <int P, bool kFour, class E>
void band(const DenseQuantisedArgs& args, const Codes& x, int64_t row, int64_t end, int64_t panel, const View& out) {
  if (x.digits == 2) {
    for (; row + 6 <= end; row += 6) store_tile_of<6, P, 2, kFour, E>(args, x, row, panel, out);
    for (; row < end; row += 2) store_tile_of<2, P, 2, kFour, E>(args, x, row, panel, out);
    return;
  }
  for (; row + 6 <= end; row += 6) store_tile_of<6, P, 1, kFour, E>(args, x, row, panel, out);
  for (; row + 3 <= end; row += 3) store_tile_of<3, P, 1, kFour, E>(args, x, row, panel, out);
  for (; row < end; ++row) store_tile_of<1, P, 1, kFour, E>(args, x, row, panel, out);
}

template <bool kFour, class E>
void multiply(const DenseQuantisedArgs& args, const Codes& x, const View& out, const Launch& launch) {
  const int64_t rows = x.digits * args.x.size[0] * args.x.size[1], panels = args.codes.size[0];
  if (rows < 6) {  // all rows for each panel while it is at hand
    return parallel_near(launch, (panels + 3) / 4, [&](int64_t task, int) {
      FlushSubnormals flush;
      for (int64_t panel = 4 * task; panel < 4 * task + 4 && panel < panels; ++panel) {
        band<1, kFour, E>(args, x, 0, rows, panel, out);
      }
    });
  }
  const int64_t columns = (panels + kTaskPanels - 1) / kTaskPanels;
  int64_t cuts = (rows + kTaskRows - 1) / kTaskRows;
  while (cuts * columns < 4 * launch.workers && rows / (cuts + 1) >= 48) ++cuts;
  const int64_t each = ((rows + cuts - 1) / cuts + 5) / 6 * 6;
  parallel(launch, columns * cuts, [&](int64_t task, int) {
    const int64_t first = task % cuts * each, end = first + each < rows ? first + each : rows;
    const int64_t begin = task / cuts * kTaskPanels, last = begin + kTaskPanels < panels ? begin + kTaskPanels : panels;
    int64_t panel = begin;
    for (; panel + 2 <= last; panel += 2) band<2, kFour, E>(args, x, first, end, panel, out);
    if (panel < last) band<1, kFour, E>(args, x, first, end, panel, out);
  });
}

bool takes(const DenseQuantisedArgs& args) { return args.rounding != QuantisedRounding::none && args.x.dtype != Dtype::f64; }

}  // namespace

int64_t dense_quantised_workspace(const DenseQuantisedArgs& args, Pass pass, int workers) {
  if (!takes(args)) return avx512::dense_quantised_workspace(args, pass, workers);
  Arena arena;
  Codes::cut(arena, args);
  return arena.used();
}
void dense_quantised_forward(const DenseQuantisedArgs& args, const DenseOut& out, const Launch& launch) {
  if (!takes(args)) return avx512::dense_quantised_forward(args, out, launch);
  Arena arena(launch.workspace);
  const Codes codes = Codes::cut(arena, args);
  const bool four = args.bits == QuantisedBits::four;
  const int zero = args.offset.given() ? 0 : four ? 8 : 128;
  by_dtype(args.x.dtype, [&]<class T, class E>() {
    if constexpr (sizeof(T) == 4) {
      round_rows<E>(args.x, zero, codes, launch);
      if (four) return multiply<true, E>(args, codes, out.out, launch);
      multiply<false, E>(args, codes, out.out, launch);
    }
  });
}

}  // namespace linnet::avx512_vnni

#endif
