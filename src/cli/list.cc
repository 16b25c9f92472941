// linnet list: the operators and what runs where on this machine.
#include <cstdio>

#include "cli/command.h"
#include "cli/print.h"
#include "core/cuda/driver.h"
#include "core/executor.h"
#include "core/files/json.h"
#include "core/isa.h"
#include "core/op.h"
#include "layers/layer.h"
#include "layers/state.h"

namespace linnet::cli {
namespace {

int list_main(const Arguments& args) {
  for (const std::string& word : args.rest()) {
    return fail(
        bad_input("list: it takes no argument, '" + word + "' was given; linnet info " + word + " describes one operator"));
  }
  Isa isa;
  if (const Status status = isa_choice(&isa); !status.ok()) return fail(status);
  const bool json = args.has("json");
  JsonWriter writer(2);
  Table table({{"operator"}, {"passes"}, {"runs here"}, {"chosen"}, {"summary"}});
  writer.begin_object().member("isa", isa_name(isa)).member("threads", default_executor().workers());
  writer.key("operators").begin_array();
  for (const Op* op : all_ops()) {
    const Impl* chosen;
    if (const Status status = choose_impl(*op, Pass::forward, {}, &chosen); !status.ok()) return fail(status);
    const bool backward = op->differentiable();
    std::string usable;
    writer.begin_object().member("name", op->name).member("mechanism", op->mechanism).member("summary", op->summary);
    writer.member("forward", true).member("backward", backward).member("chosen", chosen->name);
    writer.key("implementations").begin_array();
    for (const Impl& impl : op->impls) {
      const std::string reason = impl.missing();
      const std::string family = impl.name.substr(0, impl.name.find('.'));  // the GPU's rows together
      if (reason.empty() && !usable.ends_with(family)) usable += (usable.empty() ? "" : " ") + family;
      writer.begin_object().member("name", impl.name).member("usable", reason.empty()).member("reason", reason).end_object();
    }
    writer.end_array().end_object();
    table.row({op->name, backward ? "fwd bwd" : "fwd", usable, chosen->name, op->summary});
  }
  writer.end_array().key("layers").begin_array();
  Table layers_table({{"layer"}, {"token by token"}, {"summary"}});
  for (const layers::Layer* layer : layers::all_layers()) {
    layers::Record record;
    const Status recorded = layers::record_layer(*layer, {}, &record);
    const Status decodes = recorded.ok() ? layers::decodable(record) : recorded;
    writer.begin_object().member("name", layer->name()).member("module", layer->module);
    writer.member("summary", layer->options.summary).member("decode", decodes.ok()).end_object();
    layers_table.row({layer->name(), decodes.ok() ? "yes" : "with options", layer->options.summary});
  }
  writer.end_array().end_object();
  if (json) {
    std::printf("%s\n", writer.text().c_str());
    return kDone;
  }
  table.print(stdout);
  std::printf("\n");
  layers_table.print(stdout);
  std::printf("\nCPU: %s, %d threads; CUDA: %s\n", isa_name(isa), default_executor().workers(),
              cuda::missing().empty() ? cuda::device_name().c_str() : cuda::missing().c_str());
  return kDone;
}

}  // namespace

const Command& list_command() {
  static const Command command = {
      .name = "list",
      .summary = "operators and layers, and what runs where on this machine",
      .usage = "[--json]",
      .details = "`chosen` is what a call runs now, LINNET_ISA and LINNET_IMPL included; linnet info OP tells why.",
      .options = {{"json", "", "print JSON"}},
      .run = list_main,
  };
  return command;
}

}  // namespace linnet::cli
