// The GPU's table of Monarch attention: the ways to run a call, best last.
//
//   plain     everything, in f32 on the multiply-add units (plain/)
//   tile      16-bit, one step, at most 128 blocks of at most 128 tokens, widths up to 128: block and slot programs in one
//   launch cluster   16-bit, one step, 33 to 64 whole blocks of 64 tokens, widths up to 64: a head in a cluster of 16 blocks of
//   threads head      16-bit, one step, at most 16 blocks of at most 16 tokens (N = 256): a head in one block of threads
//
// Gradients of what tile, cluster and head take are three launches of the same tiles, or one where a head fits.
#pragma once

#include "mechanisms/monarch/monarch.h"

namespace linnet::cuda {

enum class MonarchRow : int32_t { plain, tile, cluster, head };
// Whether weights are rounded to the call's type for a matrix unit (core/tolerance.h).
constexpr bool row_rounds(MonarchRow row) { return row != MonarchRow::plain; }
constexpr bool row_needs_hopper(MonarchRow row) { return row != MonarchRow::plain; }
constexpr const char* row_name(MonarchRow row) {
  switch (row) {
    case MonarchRow::plain: return "plain";
    case MonarchRow::tile: return "tile";
    case MonarchRow::cluster: return "cluster";
    case MonarchRow::head: return "head";
  }
  return "";
}

struct MonarchTable {
  static constexpr int64_t slow_from(MonarchRow row) { return row == MonarchRow::plain ? 1024 : 0; }
  static const char* refuses(MonarchRow row, const MonarchArgs& args, const MonarchOut* out, Pass pass);
  static int64_t workspace(MonarchRow row, const MonarchArgs& args, Pass pass);
  static void forward(MonarchRow row, const MonarchArgs& args, const MonarchOut& out, const Launch& launch);
  static void backward(MonarchRow row, const MonarchArgs& args, const MonarchOut& out, const MonarchGrads& grads,
                       const Launch& launch);
};

struct MonarchTiledTable {
  static constexpr int64_t slow_from(MonarchRow row) { return row == MonarchRow::plain ? 1024 : 0; }
  static const char* refuses(MonarchRow row, const MonarchTiledArgs& args, const MonarchOut* out, Pass pass);
  static int64_t workspace(MonarchRow row, const MonarchTiledArgs& args, Pass pass);
  static void forward(MonarchRow row, const MonarchTiledArgs& args, const MonarchOut& out, const Launch& launch);
  static void backward(MonarchRow row, const MonarchTiledArgs& args, const MonarchOut& out, const MonarchGrads& grads,
                       const Launch& launch);
};

}  // namespace linnet::cuda
