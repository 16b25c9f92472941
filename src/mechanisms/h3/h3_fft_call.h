// The FFT form of H3 (h3_fft_cpu.cc) as the chunked one calls it.
#pragma once

#include "core/launch.h"
#include "h3.h"

namespace linnet::LINNET_ISA {

// Whether a forward takes it. A call that carries a state is chunked: reading or making a state costs 2 M products a token and
// (p, r), which is the chunked form itself. The backward is always chunked: its five products are each a transform more here,
// and a transform rounds every number as it rounds its largest one: gradients that cancel would lose their digits.
//
// Of its own accord a call takes it with heads of one slot, 256 to 4,096 tokens and at least 4/5 of a power of two of them:
// there it is 1.2 to 1.6 times as fast as chunks; at 16,384 tokens they meet, beyond chunks win (docs/mechanisms/h3.md).
LINNET_INLINE bool h3_wants_fft(const H3Args& args) {
  const int64_t T = args.q.size[1], C = args.q.size[2];
  if (args.form == H3Form::chunk || args.cu_seqlens.given() || T == 0 || C == 0) return false;
  if (args.initial_state_shift.given() || args.initial_state_diag.given()) return false;
  if (args.form == H3Form::fft) return true;
  int64_t n = 256;
  while (n < T) n *= 2;
  return args.log_dt.size[0] == C && n <= 4096 && 5 * T >= 4 * n;
}
void h3_fft_forward(const H3Args& args, const H3Out& out, const Launch& launch);
int64_t h3_fft_workspace(const H3Args& args, int workers);

}  // namespace linnet::LINNET_ISA
