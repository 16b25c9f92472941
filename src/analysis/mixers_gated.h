// Builders of systems that have a file of their own (mixers.cc has the rest).
#pragma once

#include "analysis/mixer_reader.h"

namespace linnet::analysis {

Status build_metala(const Reader& in, System* s, std::vector<double>* out);
// prior: linear, gated, aft or ssm, of a free energy mixer.
Status build_fem(const Reader& in, const std::string& prior, System* s, std::vector<double>* out);
Status build_zeros(const Reader& in, System* s, std::vector<double>* out);
Status build_zeros_softmax(const Reader& in, System* s, std::vector<double>* out);

}  // namespace linnet::analysis
