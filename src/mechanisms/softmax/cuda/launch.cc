#include "mechanisms/softmax/cuda/launch.h"

#include <cmath>

#include "core/cuda/device.h"
#include "core/cuda/driver.h"
#include "mechanisms/softmax/cuda/hopper.h"

LINNET_USES_IMAGES(softmax)

namespace linnet::cuda {
namespace {

constexpr const char *kPlain = "softmax/cuda/plain", *kPlainGradients = "softmax/cuda/plain_gradients",
                     *kRows = "softmax/cuda/rows";
constexpr int64_t kFar = int64_t{1} << 29, kMostTileWidth = 256, kRowWarps = 8;
constexpr int kPlainShared = 4 * (2 * 64 * 33 + 64 * 65 + 64 * kAttendSlice);

int32_t narrow(int64_t x) { return static_cast<int32_t>(x); }
int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
bool is_16_bit(Dtype dtype) { return dtype == Dtype::bf16 || dtype == Dtype::f16; }
int64_t batch_of(const Attend& p) { return p.cu_q.data != nullptr ? 1 : p.N; }
int64_t rows_of(const Attend& p) { return batch_of(p) * p.Tq * p.Hkv * p.G; }

// Tiles of `size` rows; packed, a bound for all sequences.
int32_t row_tiles(const Attend& p, int64_t size) {
  const int64_t tiles = divide_up(int64_t{p.Tq} * p.G, size);
  return narrow(p.cu_q.data != nullptr ? tiles + p.N : tiles);
}
int32_t key_tiles(const Attend& p) {
  const int64_t tiles = divide_up(p.Tk, kAttendKeys);
  return narrow(p.cu_q.data != nullptr ? tiles + p.N : tiles);
}
int64_t blocks_of(const Attend& p) {
  const int64_t sequences = p.cu_q.data != nullptr ? 1 : p.N;
  return sequences * p.Hkv * p.parts * p.tiles;
}

int32_t tile_width(const Attend& p) {
  const int32_t width = p.K > p.V ? p.K : p.V;
  return width <= 64 ? 64 : width <= 128 ? 128 : 256;
}
bool is_few(const Attend& p) { return int64_t{p.Tq} * p.G <= 32; }  // rows: few.cuh, and split keys
int64_t tile_rows(AttendRow row, const Attend& p) { return row == AttendRow::plain ? 64 : is_few(p) ? 16 : 128; }

// Parts of the keys: enough blocks of one item for an H200's 132 multiprocessors, each with 256 keys or more where rows are few
// (a decode), else with 2048. Not by the number of items: a row has the same bits in every batch.
int32_t parts_of(AttendRow row, const Attend& p) {
  if (p.cu_q.data != nullptr || row == AttendRow::hopper) return 1;
  const bool few = is_few(p);
  const int64_t blocks = p.Hkv * row_tiles(p, tile_rows(row, p));
  const int64_t wanted = few ? 132 * 3 : 132;
  if (blocks == 0 || blocks * 2 > wanted) return 1;
  const int64_t most = p.Tk / (few ? 256 : 2048), parts = wanted / blocks < kMostParts ? wanted / blocks : kMostParts;
  return narrow(parts < most ? parts : most < 1 ? 1 : most);
}
void cut_parts(Arena& arena, Attend* p) {
  if (p->parts == 1) return;
  p->part_read = arena.take<float>(p->parts * rows_of(*p) * p->V);
  p->part_lse = arena.take<float>(p->parts * rows_of(*p));
}

AttendRows dense_numbers(float* data, const Attend& p) {  // [B, Tq, H]
  const int64_t heads = int64_t{p.Hkv} * p.G;
  return {data, p.Tq * heads, heads, 1, Dtype::f32, false};
}

}  // namespace

AttendRows attend_rows(const View& x) {
  if (!x.given()) return {};
  const int64_t each = 16 / dtype_size(x.dtype);
  const bool aligned = x.rank == 4 && reinterpret_cast<uintptr_t>(x.data) % 16 == 0 && x.stride[0] % each == 0 &&
                       x.stride[1] % each == 0 && x.stride[2] % each == 0 && x.size[3] % each == 0;
  return {x.data, x.stride[0], x.stride[1], x.stride[2], x.dtype, aligned};
}
AttendIndices attend_indices(const View& x) {
  if (!x.given()) return {};
  return {x.data, {x.stride[0], x.rank > 1 ? x.stride[1] : 0}, x.dtype == Dtype::i64};
}
AttendNumbers attend_numbers(const View& x) {
  AttendNumbers numbers;
  if (!x.given()) return numbers;
  numbers.data = x.data;
  numbers.dtype = x.dtype;
  for (int d = 0; d < x.rank && d < 4; ++d) numbers.stride[d] = x.stride[d];
  return numbers;
}
AttendMask attend_mask(bool causal, Window window, int64_t prefix, int64_t chunk) {
  const auto bounded = [](int64_t x) { return narrow(x < kFar ? x : kFar); };
  return {bounded(window.left), causal ? 0 : bounded(window.right), bounded(prefix), bounded(chunk)};
}
void set_tensors(Attend* p, const View& q, const View& k, const View& v) {
  p->q = attend_rows(q);
  p->k = attend_rows(k);
  p->v = attend_rows(v);
  p->N = q.size[0];
  p->Tq = narrow(q.size[1]);
  p->Tk = narrow(k.size[1]);
  p->Hkv = narrow(k.size[2]);
  p->G = narrow(k.size[2] == 0 ? 0 : q.size[2] / k.size[2]);
  p->K = narrow(q.size[3]);
  p->V = narrow(v.size[3]);
}
void set_logits(Attend* p, double scale, double softcap) {
  p->scale = static_cast<float>(scale);
  p->softcap = static_cast<float>(softcap);
  p->factor = static_cast<float>(scale * 1.4426950408889634);
  p->hooked = softcap > 0 || p->bias.data != nullptr || !(p->factor > 0);
}
Attend attend_of(const SoftmaxArgs& args) {
  Attend p;
  set_tensors(&p, args.q, args.k, args.v);
  p.bias = attend_numbers(args.bias);
  p.sinks = attend_numbers(args.sinks);
  p.lengths = attend_indices(args.key_len);
  if (args.cu_seqlens_q.given()) {
    p.cu_q = attend_indices(args.cu_seqlens_q);
    p.cu_k = attend_indices(args.cu_seqlens_k);
    p.N = args.cu_seqlens_q.size[0] - 1;
  }
  p.mask = attend_mask(args.causal, args.window, args.prefix, args.chunk);
  set_logits(&p, args.scale.value_or(1 / std::sqrt(static_cast<double>(args.q.size[3]))), args.softcap);
  return p;
}
Attend attend_of(const SoftmaxDecodeArgs& args) {
  Attend p;
  set_tensors(&p, args.q, args.k_cache, args.v_cache);
  p.sinks = attend_numbers(args.sinks);
  p.lengths = attend_indices(args.lengths);
  p.start = attend_indices(args.cache_start);
  p.mask = attend_mask(true, args.window, args.prefix, 0);
  set_logits(&p, args.scale.value_or(1 / std::sqrt(static_cast<double>(args.q.size[3]))), args.softcap);
  return p;
}
Attend attend_of(const SoftmaxPagedArgs& args) {
  Attend p;
  set_tensors(&p, args.q, args.k_pages, args.v_pages);
  p.pages = attend_indices(args.page_table);
  p.page = narrow(args.k_pages.size[1]);
  p.page_count = args.k_pages.size[0];
  p.Tk = narrow(args.page_table.size[1] * args.k_pages.size[1]);
  p.sinks = attend_numbers(args.sinks);
  p.lengths = attend_indices(args.lengths);
  p.mask = attend_mask(args.causal, args.window, args.prefix, 0);
  set_logits(&p, args.scale.value_or(1 / std::sqrt(static_cast<double>(args.q.size[3]))), args.softcap);
  return p;
}

namespace {

// Rows that the copy engine can read: `count` of each dimension.
bool is_reachable(const AttendRows& x, int64_t B, int64_t T, int64_t H) {
  return x.aligned && (B == 1 || x.stride_b > 0) && (T == 1 || x.stride_t > 0) && (H == 1 || x.stride_h > 0);
}
const char* hopper_refuses(const Attend& p, Pass pass) {
  if (!is_hopper()) return kNeedsHopper;
  if (pass == Pass::backward) return "it has no gradients: those of tile are taken";
  if (p.K != p.V || (p.K != 64 && p.K != 128)) return "it takes keys and values of 64 or of 128 channels";
  if (p.hooked) return "it takes no bias, no soft cap, and a scale above 0";
  if (p.cu_q.data != nullptr || p.lengths.data != nullptr || p.pages.data != nullptr) {
    return "it takes no packed sequences, lengths or pages";
  }
  if (p.Tq < kHopperRows || p.Tk < 1) return "it takes 128 queries or more";
  const int64_t heads = int64_t{p.Hkv} * p.G;
  return is_reachable(p.q, p.N, p.Tq, heads) && is_reachable(p.k, p.N, p.Tk, p.Hkv) && is_reachable(p.v, p.N, p.Tk, p.Hkv)
             ? nullptr
             : "rows of q, k or v do not lie at multiples of 16 bytes, or are repeated";
}
bool encode(TensorMap* map, const AttendRows& x, int64_t B, int64_t T, int64_t H, int64_t width) {
  const auto distance = [](int64_t count, int64_t stride) {
    return count == 1 ? uint64_t{128} : static_cast<uint64_t>(stride) * 2;
  };
  const uint64_t size[5] = {64, static_cast<uint64_t>(T), static_cast<uint64_t>(width / 64), static_cast<uint64_t>(H),
                            static_cast<uint64_t>(B)};
  const uint64_t stride[4] = {distance(T, x.stride_t), 128, distance(H, x.stride_h), distance(B, x.stride_b)};
  const uint32_t box[5] = {64, kHopperKeys, static_cast<uint32_t>(width / 64), 1, 1};
  return encode_tensor_map(map, x.dtype, x.data, 5, size, stride, box);
}
void run_hopper(const Launch& launch, Attend p) {
  const int64_t heads = int64_t{p.Hkv} * p.G;
  HopperMaps maps;
  if (!encode(&maps.q, p.q, p.N, p.Tq, heads, p.K) || !encode(&maps.k, p.k, p.N, p.Tk, p.Hkv, p.K) ||
      !encode(&maps.v, p.v, p.N, p.Tk, p.Hkv, p.V)) {
    *launch.error = "the copy engine does not take these strides";
    return;
  }
  static constexpr const char* kNames[2][2] = {{"hopper_f16_64", "hopper_f16_128"}, {"hopper_bf16_64", "hopper_bf16_128"}};
  p.tiles = narrow(divide_up(p.Tq, kHopperRows));
  const char* const name = kNames[p.q.dtype == Dtype::bf16][p.K == 128];
  enqueue(launch, {"softmax/cuda/hopper", name, 384, hopper_shared(p.K)}, {p.N * heads * p.tiles}, p, maps);
}
// Shared memory of the tiles' kernels.
int pitch_of(const Attend& p) { return 2 * tile_width(p) + 16; }
int few_bytes(const Attend& p) { return (16 + 4 * kAttendKeys) * pitch_of(p); }
int tile_bytes(const Attend& p) { return (128 + 2 * kAttendKeys) * pitch_of(p); }
int gradient_bytes(const Attend& p) { return 6 * kAttendKeys * pitch_of(p) + 2 * 1280; }

}  // namespace

const char* attend_refuses(AttendRow row, const Attend& p, Pass pass) {
  if (p.q.dtype == Dtype::f64) return "the CUDA kernels have no f64";
  if (int64_t{p.Tq} * p.G > kFar || p.Tk > kFar) return "the CUDA kernels take fewer than 2^29 tokens";
  if (row == AttendRow::plain) return nullptr;
  if (!is_16_bit(p.q.dtype) || p.k.dtype != p.q.dtype || p.v.dtype != p.q.dtype) return "its tensors are bf16 or f16";
  if (p.K > kMostTileWidth || p.V > kMostTileWidth) return "it takes keys and values of at most 256 channels";
  if (row == AttendRow::hopper) return hopper_refuses(p, pass);
  const int bytes = pass == Pass::backward ? gradient_bytes(p) : is_few(p) ? few_bytes(p) : tile_bytes(p);
  return bytes > shared_bytes_of_block() ? "tiles of so many channels do not fit the shared memory of this GPU" : nullptr;
}

int64_t attend_workspace(AttendRow row, const Attend& call) {
  Attend p = call;
  p.parts = parts_of(row, p);
  Arena arena;
  cut_parts(arena, &p);
  return arena.used();
}

void run_attend(const Launch& launch, AttendRow row, Attend p, char* workspace) {
  p.parts = parts_of(row, p);
  p.tiles = row_tiles(p, tile_rows(row, p));
  if (rows_of(p) == 0) return;
  if (row == AttendRow::hopper) return run_hopper(launch, p);
  Arena arena(workspace);
  cut_parts(arena, &p);
  if (row == AttendRow::plain) {
    const int64_t slices = divide_up(p.V, kAttendSlice);
    enqueue(launch, {kPlain, "plain_attend", kPlainThreads, kPlainShared}, {blocks_of(p), slices > 0 ? slices : 1}, p);
  } else {
    const int32_t width = tile_width(p);
    const int index = width == 64 ? 0 : width == 128 ? 1 : 2;
    const bool bf16 = p.q.dtype == Dtype::bf16;
    if (is_few(p)) {
      static constexpr const char* kNames[3] = {"few_64", "few_128", "few_256"};
      const char* const image = bf16 ? "softmax/cuda/few_bf16" : "softmax/cuda/few_f16";
      enqueue(launch, {image, kNames[index], 128, few_bytes(p)}, {blocks_of(p)}, p);
    } else {
      static constexpr const char* kNames[3] = {"attend_64", "attend_128", "attend_256"};
      const char* const image = bf16 ? "softmax/cuda/tile_bf16" : "softmax/cuda/tile_f16";
      enqueue(launch, {image, kNames[index], 256, tile_bytes(p)}, {blocks_of(p)}, p);
    }
  }
  if (p.parts > 1) enqueue(launch, {kRows, "join_parts", 512}, {rows_of(p)}, p);
}

int64_t attend_gradients_workspace(const Attend& p) {
  Arena arena;
  if (p.delta.data == nullptr) arena.take<float>(rows_of(p));
  return arena.used();
}

void run_attend_gradients(const Launch& launch, AttendRow row, Attend p, const View& dbias, const View& dsinks,
                          char* workspace) {
  p.parts = 1;
  if (p.delta.data == nullptr && rows_of(p) > 0) {
    Arena arena(workspace);
    p.delta = dense_numbers(arena.take<float>(rows_of(p)), p);
    enqueue(launch, {kRows, "row_deltas", 256}, {divide_up(rows_of(p), kRowWarps)}, p);
  }
  // Without a gradient of the output there is nothing for the tiles to multiply.
  const bool tiles = row != AttendRow::plain && p.dout.data != nullptr && p.dout.dtype == p.q.dtype;
  const int32_t width = tile_width(p), index = width == 64 ? 0 : width == 128 ? 1 : 2;
  const char* const image = p.q.dtype == Dtype::bf16 ? "softmax/cuda/gradients_bf16" : "softmax/cuda/gradients_f16";
  const int shared = gradient_bytes(p);
  if (p.dq.data != nullptr && rows_of(p) > 0) {
    static constexpr const char* kNames[3] = {"query_gradients_64", "query_gradients_128", "query_gradients_256"};
    p.tiles = row_tiles(p, 64);
    if (tiles) {
      enqueue(launch, {image, kNames[index], 128, shared}, {blocks_of(p)}, p);
    } else if (p.K > 0) {
      enqueue(launch, {kPlainGradients, "plain_query_gradients", kPlainThreads, kPlainShared},
              {blocks_of(p), divide_up(p.K, kAttendSlice)}, p);
    }
  }
  const int64_t wider = p.K > p.V ? p.K : p.V;
  if ((p.dk.data != nullptr || p.dv.data != nullptr) && p.Tk > 0 && p.G > 0) {
    static constexpr const char* kNames[3] = {"key_gradients_64", "key_gradients_128", "key_gradients_256"};
    p.tiles = key_tiles(p);
    if (tiles) {
      enqueue(launch, {image, kNames[index], width == 256 ? 256 : 128, shared}, {blocks_of(p)}, p);
    } else if (wider > 0) {
      enqueue(launch, {kPlainGradients, "plain_key_gradients", kPlainThreads, kPlainShared},
              {blocks_of(p), divide_up(wider, kAttendSlice)}, p);
    }
  }
  if (dsinks.given()) {
    enqueue(launch, {kRows, "sink_gradients", 256}, {int64_t{p.Hkv} * p.G}, p, attend_numbers(dsinks));
  }
  if (dbias.given() && dbias.elements() > 0) {
    if (p.exact_v.data != nullptr) p.v = p.exact_v;
    BiasGradient to;
    to.to = attend_numbers(dbias);
    for (int d = 0; d < 4; ++d) to.size[d] = dbias.size[d];
    to.tiles_q = narrow(to.size[2] == 1 ? 1 : divide_up(to.size[2], 64));
    to.tiles_k = narrow(to.size[3] == 1 ? 1 : divide_up(to.size[3], 64));
    enqueue(launch, {kPlainGradients, "plain_bias_gradient", kPlainThreads, kPlainShared},
            {to.size[0] * to.size[1] * to.tiles_q * to.tiles_k}, p, to);
  }
}

void append_tokens(const Launch& launch, const SoftmaxDecodeArgs& args) {
  AppendTokens p;
  p.k = attend_rows(args.k);
  p.v = attend_rows(args.v);
  p.k_cache = attend_rows(args.k_cache);
  p.v_cache = attend_rows(args.v_cache);
  p.lengths = attend_indices(args.lengths);
  p.T = narrow(args.q.size[1]);
  p.heads = narrow(args.k.size[2]);
  p.K = narrow(args.k.size[3]);
  p.V = narrow(args.v.size[3]);
  p.capacity = narrow(args.k_cache.size[1]);
  if (args.q.size[0] > 0) enqueue(launch, {kRows, "append_tokens", 256}, {args.q.size[0]}, p);
}

}  // namespace linnet::cuda
