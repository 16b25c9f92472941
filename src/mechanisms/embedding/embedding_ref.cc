// The plain loops of embedding and embedding_quantised: their specification.
#include "core/element.h"
#include "embedding.h"
#include "mechanisms/dense/dense_pack.h"

namespace linnet::ref {
namespace {

template <class Value>
void fill(const View& out, const View& ids, double scale, const Value& value) {
  for (int64_t b = 0; b < out.size[0]; ++b) {
    for (int64_t t = 0; t < out.size[1]; ++t) {
      const int64_t id = static_cast<int64_t>(element(ids, b, t));
      for (int64_t c = 0; c < out.size[2]; ++c) set_element(out, scale * value(id, c), b, t, c);
    }
  }
}

}  // namespace

void embedding_forward(const EmbeddingArgs& args, const EmbeddingOut& out, const Launch&) {
  fill(out.out, args.ids, args.scale, [&](int64_t id, int64_t c) { return element(args.table, id, c); });
}
int64_t embedding_workspace(const EmbeddingArgs&, Pass, int) { return 0; }

void embedding_quantised_forward(const EmbeddingQuantisedArgs& args, const EmbeddingOut& out, const Launch&) {
  fill(out.out, args.ids, args.scale,
       [&](int64_t id, int64_t c) { return dense_weight(args.bits, args.codes, args.scales, args.offset, id, c); });
}
int64_t embedding_quantised_workspace(const EmbeddingQuantisedArgs&, Pass, int) { return 0; }

}  // namespace linnet::ref
