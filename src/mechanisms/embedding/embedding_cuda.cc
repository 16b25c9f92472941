// embedding on the GPU (embedding_cuda.cu).
#include "embedding.h"
#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(embedding)

namespace linnet::cuda {

const char* embedding_refuses(const EmbeddingArgs& args, Pass) { return refuses_f64(args.table.dtype); }
int64_t embedding_workspace(const EmbeddingArgs&, Pass, int) { return 0; }
void embedding_forward(const EmbeddingArgs& args, const EmbeddingOut& out, const Launch& launch) {
  const View& to = out.out;
  const bool whole = all_whole(args.table, to);
  const auto per_row = static_cast<int32_t>(divide_up(to.size[2], kVectorBytes / dtype_size(args.table.dtype)));
  enqueue(launch, {"embedding/embedding_cuda", LINNET_BY_TYPE(embed, args.table.dtype), 256},
          {divide_up(to.size[0] * to.size[1] * per_row, 256)}, args.table, args.ids, to, static_cast<float>(args.scale), whole,
          per_row);
}

const char* embedding_quantised_refuses(const EmbeddingQuantisedArgs& args, Pass) { return refuses_f64(args.scales.dtype); }
int64_t embedding_quantised_workspace(const EmbeddingQuantisedArgs&, Pass, int) { return 0; }
void embedding_quantised_forward(const EmbeddingQuantisedArgs& args, const EmbeddingOut& out, const Launch& launch) {
  enqueue(launch, {"embedding/embedding_cuda", "embed_quantised", 256}, {divide_up(out.out.elements(), 256)}, args, out.out);
}

}  // namespace linnet::cuda
