// layer_norm on the GPU (layer_norm_cuda.cu).
#include "layer_norm_cuda.h"

#include "core/heads.h"
#include "layer_norm.h"
#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(layer_norm)

namespace linnet::cuda {
namespace {

constexpr const char* kImage = "layer_norm/layer_norm_cuda";
constexpr int64_t kMostBlocks = 264;  // of the backward: two for each of 132 multiprocessors, by the shape alone

LayerNormRows rows_of(const LayerNormArgs& args) {
  LayerNormRows r;
  r.x = with_heads(args.x);
  r.T = r.x.size[1];
  r.H = static_cast<int32_t>(r.x.size[2]);
  r.D = static_cast<int32_t>(r.x.size[3]);
  r.rows = r.x.size[0] * r.T * r.H;
  const int64_t blocks = divide_up(r.rows, 32);
  r.warps = 8 * (blocks < kMostBlocks ? blocks : kMostBlocks);
  r.unit = r.D == 0 ? 1 : 1 / static_cast<float>(r.D);
  r.eps = static_cast<float>(args.eps);
  r.weight = args.weight;
  r.bias = args.bias;
  return r;
}

// Rows of whole pieces stay in registers: of a warp when they are short, of a block up to 512 pieces; else any rows.
enum class Length { any, shorter, longer };
Length length_of(const LayerNormRows& r) {
  const int64_t pieces = r.D / (kVectorBytes / dtype_size(r.x.dtype));
  if (!r.whole || !has_whole_rows(r.weight) || !has_whole_rows(r.bias) || pieces > 512) return Length::any;
  return pieces <= 64 ? Length::shorter : Length::longer;
}

}  // namespace

const char* layer_norm_refuses(const LayerNormArgs& args, Pass) { return refuses_f64(args.x.dtype); }
int64_t layer_norm_workspace(const LayerNormArgs& args, Pass pass, int) {
  Arena arena;
  if (pass == Pass::backward) {
    const LayerNormRows r = rows_of(args);
    for (const View* view : {&args.weight, &args.bias}) {
      if (view->given()) arena.take<float>(r.warps * r.D);
    }
  }
  return arena.used();
}
void layer_norm_forward(const LayerNormArgs& args, const LayerNormOut& out, const Launch& launch) {
  LayerNormRows r = rows_of(args);
  r.out = with_heads(out.out);
  r.whole = all_whole(r.x, r.out);
  const Length length = length_of(r);
  const char* name = length == Length::any       ? LINNET_BY_TYPE(layer_norm, args.x.dtype)
                     : length == Length::shorter ? LINNET_BY_TYPE(layer_norm_short, args.x.dtype)
                                                 : LINNET_BY_TYPE(layer_norm_long, args.x.dtype);
  enqueue(launch, {kImage, name, 256}, {length == Length::longer ? r.rows : divide_up(r.rows, 8)}, r);
}
void layer_norm_backward(const LayerNormArgs& args, const LayerNormOut&, const LayerNormGrads& grads, const Launch& launch) {
  LayerNormRows r = rows_of(args);
  r.dout = with_heads(grads.dout);
  r.dx = with_heads(grads.dx);
  r.whole = all_whole(r.x, r.dout, r.dx);
  Arena arena(launch.workspace);
  if (grads.dweight.given()) r.weight_sums = arena.take<float>(r.warps * r.D);
  if (grads.dbias.given()) r.bias_sums = arena.take<float>(r.warps * r.D);
  const Length length = length_of(r);
  const char* name = length == Length::any       ? LINNET_BY_TYPE(layer_norm_back, args.x.dtype)
                     : length == Length::shorter ? LINNET_BY_TYPE(layer_norm_back_short, args.x.dtype)
                                                 : LINNET_BY_TYPE(layer_norm_back_long, args.x.dtype);
  if (length == Length::longer) r.warps = r.warps < 4 * 132 ? r.warps : 4 * 132;  // each part is a block's
  enqueue(launch, {kImage, name, 256}, {length == Length::longer ? r.warps : r.warps / 8}, r);
  sum_parts(launch, r.weight_sums, r.warps, grads.dweight);
  sum_parts(launch, r.bias_sums, r.warps, grads.dbias);
}

}  // namespace linnet::cuda
