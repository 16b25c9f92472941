// Layers: the papers' layers by name, and layers of your own from the same parts. See examples/cpp/layer.cc.
//
//   using namespace linnet::layers;
//   Record record;
//   LINNET_TRY(record_layer(*find_layer("gated_deltanet"), {{"hidden", "1024"}, {"heads", "4"}}, &record));
//   Runner runner;
//   LINNET_TRY(Runner::make(std::move(record), {}, &runner));
#pragma once

#include "layers/layer.h"
#include "layers/record.h"
#include "layers/runner.h"
#include "layers/state.h"
