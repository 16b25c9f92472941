// activation, glu and add on the GPU (activation_cuda.cu).
#include "activation_cuda.h"

#include "activation_kinds.h"
#include "core/heads.h"
#include "mechanisms/shared/pieces.h"

LINNET_USES_IMAGES(activation)

namespace linnet::cuda {
namespace {

void run_elements(const Launch& launch, Elements e) {
  View* const views[] = {&e.x, &e.y, &e.dout, &e.out, &e.dx, &e.dy};
  for (View* view : views) *view = with_heads(*view);
  const View& like = e.x;
  e.T = like.size[1];
  e.H = static_cast<int32_t>(like.size[2]);
  e.D = static_cast<int32_t>(like.size[3]);
  const int64_t vector = kVectorBytes / dtype_size(like.dtype);
  e.whole = all_whole(e.x, e.y, e.dout, e.out, e.dx, e.dy);
  e.dense = e.whole && all_dense(e.x, e.y, e.dout, e.out, e.dx, e.dy);
  e.per_row = static_cast<int32_t>(divide_up(e.D, vector));
  e.pieces = like.size[0] * e.T * e.H * e.per_row;
  const auto name = [&] {
    switch (e.op) {
      case Elementwise::activation: return LINNET_BY_TYPE(activation, like.dtype);
      case Elementwise::activation_back: return LINNET_BY_TYPE(activation_back, like.dtype);
      case Elementwise::glu: return LINNET_BY_TYPE(glu, like.dtype);
      case Elementwise::glu_back: return LINNET_BY_TYPE(glu_back, like.dtype);
      case Elementwise::add: return LINNET_BY_TYPE(add, like.dtype);
      case Elementwise::add_back: break;
    }
    return LINNET_BY_TYPE(add_back, like.dtype);
  };
  enqueue(launch, {"activation/activation_cuda", name(), 256}, {divide_up(e.pieces, 512)}, e);
}

}  // namespace

const char* activation_refuses(const ActivationArgs& args, Pass) { return refuses_f64(args.x.dtype); }
int64_t activation_workspace(const ActivationArgs&, Pass, int) { return 0; }
void activation_forward(const ActivationArgs& args, const ActivationOut& out, const Launch& launch) {
  Elements e;
  e.x = args.x;
  e.out = out.out;
  e.act = args.act;
  e.cap = static_cast<float>(args.cap);
  run_elements(launch, e);
}
void activation_backward(const ActivationArgs& args, const ActivationOut&, const ActivationGrads& grads, const Launch& launch) {
  Elements e;
  e.op = Elementwise::activation_back;
  e.x = args.x;
  e.dout = grads.dout;
  e.dx = grads.dx;
  e.act = args.act;
  e.cap = static_cast<float>(args.cap);
  run_elements(launch, e);
}

const char* glu_refuses(const GluArgs& args, Pass) { return refuses_f64(args.gate.dtype); }
int64_t glu_workspace(const GluArgs&, Pass, int) { return 0; }
void glu_forward(const GluArgs& args, const ActivationOut& out, const Launch& launch) {
  Elements e;
  e.op = Elementwise::glu;
  e.x = args.gate;
  e.y = args.up;
  e.out = out.out;
  e.act = gate_activation(args.act);
  run_elements(launch, e);
}
void glu_backward(const GluArgs& args, const ActivationOut&, const GluGrads& grads, const Launch& launch) {
  Elements e;
  e.op = Elementwise::glu_back;
  e.x = args.gate;
  e.y = args.up;
  e.dout = grads.dout;
  e.dx = grads.dgate;
  e.dy = grads.dup;
  e.act = gate_activation(args.act);
  run_elements(launch, e);
}

const char* add_refuses(const AddArgs& args, Pass) { return refuses_f64(args.x.dtype); }
int64_t add_workspace(const AddArgs&, Pass, int) { return 0; }
void add_forward(const AddArgs& args, const ActivationOut& out, const Launch& launch) {
  Elements e;
  e.op = Elementwise::add;
  e.x = args.x;
  e.y = args.y;
  e.out = out.out;
  e.scale = static_cast<float>(args.scale);
  run_elements(launch, e);
}
void add_backward(const AddArgs& args, const ActivationOut&, const AddGrads& grads, const Launch& launch) {
  Elements e;
  e.op = Elementwise::add_back;
  e.x = args.x;
  e.dout = grads.dout;
  e.dx = grads.dx;
  e.dy = grads.dy;
  e.scale = static_cast<float>(args.scale);
  run_elements(launch, e);
}

}  // namespace linnet::cuda
