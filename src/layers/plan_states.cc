// Steps that remember: which form of an operator continues a state, and how caches and final states come back to it.
#include <algorithm>

#include "core/log.h"
#include "layers/memory.h"
#include "layers/plan.h"

namespace linnet::layers {
namespace {

const TensorDecl* final_of(const Op& op, const std::string& state) {
  const TensorDecl* decl = op.find_output("final_" + state);
  return decl != nullptr ? decl : op.find_output(state);
}
const TensorDecl* initial_of(const Op& op, const std::string& state) {
  const TensorDecl* decl = op.find_input("initial_" + state);
  return decl != nullptr ? decl : op.find_input(state);
}

View rows_of(const View& view, int64_t begin, int64_t count) {  // of dimension 1
  View part = view;
  part.data = at(view, begin * view.stride[1]);
  part.size[1] = count;
  return part;
}

std::string setting_of(const std::vector<Setting>& settings, std::string_view name) {
  for (const Setting& setting : settings) {
    if (setting.name == name) return setting.text;
  }
  return "";
}

// Why a decode operator takes the tokens of a prompt one by one; null: it takes them in chunks (docs/layers.md, limits).
const char* one_by_one(const Continuation& next, int64_t position) {
  const std::string& op = next.op->name;
  if (op == "monarch_decode" && position > 0) return "tokens came before them";
  if (op == "hierarchical_decode" && setting_of(next.options, "tie") != "row") return "tie is prefix";
  if (op == "hierarchical_decode" && position > 0) return "tokens came before them";
  if (op == "features_decode" && setting_of(next.options, "map") == "cosformer") return "map is cosformer";
  const std::string prior = op == "fem_read_decode" ? setting_of(next.options, "prior") : "";
  return prior == "aft" ? "prior is aft" : prior == "ssm" ? "prior is ssm" : nullptr;
}

}  // namespace

// Tokens behind a cache that keeps a window: the operator reads what is left of the cache and the new keys one behind the
// other; then the cache takes what will still be seen.
Status PlanBuilder::add_bounded(const Step& step, const Piece& piece, int number, const std::vector<int>& states,
                                const CacheBound& bound) {
  const std::vector<StateTensor>& tensors = piece.state->tensors();
  int64_t held = 0;
  View lengths;
  for (const int i : states) {
    const StateTensor& tensor = tensors[static_cast<size_t>(i)];
    if (tensor.input != "lengths") continue;
    lengths = tensor.view;
    View first = lengths;
    first.size[0] = 1;
    LINNET_TRY(get_bytes(first, &held));
  }
  const int64_t first = std::min(held, bound.prefix), recent = std::min(held - first, bound.left);
  const int64_t all = first + recent + piece.tokens;
  const int64_t kept_first = std::min(all, bound.prefix), kept = std::min(all - kept_first, bound.left);
  char* place = arena_ + temporary_;
  std::vector<Extra> extras;
  std::vector<std::pair<View, View>> after;
  for (const int i : states) {
    const StateTensor& tensor = tensors[static_cast<size_t>(i)];
    if (tensor.input == "lengths") continue;
    const View& cache = tensor.view;
    const std::string input = tensor.input.substr(0, tensor.input.size() - 6);
    const auto entry =
        std::find_if(step.inputs.begin(), step.inputs.end(), [&](const auto& named) { return named.first == input; });
    const View fresh = sliced(entry->second, &piece);
    View joined = fresh;
    if (held > 0 || cache.dtype != fresh.dtype) {
      int64_t sizes[kMaxRank];
      std::copy_n(cache.size, cache.rank, sizes);
      sizes[1] = all;
      joined = placed(place, cache.dtype, sizes, cache.rank);
      place += aligned(bytes_of(joined));
      add_copy(rows_of(cache, 0, first), rows_of(joined, 0, first));
      add_copy(rows_of(cache, held - recent, recent), rows_of(joined, first, recent));
      LINNET_TRY(add_cast(fresh, entry->second, rows_of(joined, first + recent, piece.tokens), -1));
      extras.push_back({input, joined});
    }
    after.emplace_back(rows_of(joined, 0, kept_first), rows_of(cache, 0, kept_first));
    after.emplace_back(rows_of(joined, all - kept, kept), rows_of(cache, kept_first, kept));
  }
  LINNET_TRY(add_attention(step, *step.op, step.options, &piece, number, extras));
  for (const auto& [from, to] : after) add_copy(from, to);
  add_lengths(lengths, number, kept_first + kept);
  return {};
}

PlanBuilder::Memory PlanBuilder::memory_of(const Op& op, const Piece& piece, const std::vector<int>& states) const {
  if (call_->decode) return Memory::decode;
  const std::vector<StateTensor>& tensors = piece.state->tensors();
  bool initial = true, final = true, caches = true;
  for (const int i : states) {
    const std::string& name = tensors[static_cast<size_t>(i)].input;
    initial &= initial_of(op, name) != nullptr;
    final &= final_of(op, name) != nullptr;
    const bool cache = name == "lengths" || (name.size() > 6 && name.compare(name.size() - 6, 6, "_cache") == 0 &&
                                             op.find_input(name.substr(0, name.size() - 6)) != nullptr);
    caches &= cache;
  }
  if (initial && final) return Memory::states;
  const TensorDecl* q = op.find_input("q");
  const bool aligned_queries = q != nullptr && q->shape.find("Tq") != std::string::npos;
  if (caches && (piece.position == 0 || aligned_queries)) return Memory::cache;
  if (final && piece.position == 0) return Memory::finals;
  return Memory::decode;
}

Status PlanBuilder::add_memory_step(int index, const Step& step) {
  const Op& op = *step.op;
  if (!call_->with_states) {
    const bool packed = !call_->offsets.empty();
    const bool takes_offsets = op.find_input("cu_seqlens") != nullptr || op.find_input("cu_seqlens_q") != nullptr;
    if (!packed) return add_attention(step, op, step.options, nullptr, 0, {});
    if (takes_offsets) {
      const int64_t count = static_cast<int64_t>(plan_->offsets_.size());
      const View offsets = View::dense(plan_->offsets_.data(), Dtype::i64, {count});
      std::vector<Extra> extras;
      for (const char* name : {"cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"}) {
        if (op.find_input(name) != nullptr) extras.push_back({name, offsets});
      }
      return add_attention(step, op, step.options, nullptr, 0, extras);
    }
    for (size_t p = 0; p < call_->pieces.size(); ++p) {
      const Piece& piece = call_->pieces[p];
      if (piece.tokens > 0) LINNET_TRY(add_attention(step, op, step.options, &piece, static_cast<int>(p), {}));
    }
    return {};
  }
  Continuation next;
  LINNET_TRY(continuation(record_, step, &next));
  const CacheBound bound = cache_bound(step);
  for (size_t p = 0; p < call_->pieces.size(); ++p) {
    const Piece& piece = call_->pieces[p];
    const int number = static_cast<int>(p);
    const std::vector<StateTensor>& tensors = piece.state->tensors();
    std::vector<int> states;
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (tensors[i].step == index) states.push_back(static_cast<int>(i));
    }
    const auto tensor = [&](int i) -> const StateTensor& { return tensors[static_cast<size_t>(i)]; };
    std::vector<Extra> extras;
    switch (memory_of(op, piece, states)) {
      case Memory::decode: {
        const char* why = call_->decode ? nullptr : one_by_one(next, piece.position);
        if (why != nullptr) {
          log_once(record_.name + ": " + next.op->name + " takes the tokens of a prompt one by one where " + why +
                   ", which is slow for many");
        }
        for (const int i : states) extras.push_back({tensor(i).input, tensor(i).view, i});
        LINNET_TRY(add_attention(step, *next.op, next.options, &piece, number, extras));
        break;
      }
      case Memory::states:
      case Memory::finals: {
        char* place = arena_ + temporary_;
        std::vector<std::pair<View, View>> copies;
        for (const int i : states) {
          const View& state = tensor(i).view;
          const TensorDecl* initial = initial_of(op, tensor(i).input);
          if (initial != nullptr) extras.push_back({initial->name, state});
          const View result = placed(place, state.dtype, state.size, state.rank);
          place += aligned(bytes_of(state));
          extras.push_back({final_of(op, tensor(i).input)->name, result});
          copies.emplace_back(result, state);
        }
        LINNET_TRY(add_op(step, op, step.options, &piece, number, extras));
        for (const auto& [from, to] : copies) add_copy(from, to);
        break;
      }
      case Memory::cache: {
        if (bound.given()) {
          LINNET_TRY(add_bounded(step, piece, number, states, bound));
          break;
        }
        for (const int i : states) {
          const std::string& name = tensor(i).input;
          View cache = tensor(i).view;
          if (name == "lengths") {
            add_lengths(cache, number, -1);
            continue;
          }
          const std::string input = name.substr(0, name.size() - 6);
          const auto entry =
              std::find_if(step.inputs.begin(), step.inputs.end(), [&](const auto& named) { return named.first == input; });
          const View fresh = sliced(entry->second, &piece);
          View target = cache;
          target.data = at(cache, piece.position * cache.stride[1]);
          target.size[1] = piece.tokens;
          LINNET_TRY(add_cast(fresh, entry->second, target, -1));
          cache.size[1] = piece.position + piece.tokens;
          if (piece.position > 0 || cache.dtype != fresh.dtype) extras.push_back({input, cache});
        }
        LINNET_TRY(add_attention(step, op, step.options, &piece, number, extras));
        break;
      }
    }
  }
  return {};
}

}  // namespace linnet::layers
