// Layers as data: what Python makes modules of, and `linnet info LAYER --json` prints.
//
//   {"name": "gated_deltanet", "module": "GatedDeltaNet", "mechanism": ..., "summary": ..., "equation": ..., "paper": ...,
//    "options": [{"name": "hidden", "kind": "integer", "value": "2048", "default": "2048", "low": 1, "high": null,
//                 "choices": [], "doc": ...}],
//    "tokens": 0,                                    the only legal number of tokens; 0: any
//    "growing": false,                               a state only grows: which gates hold (core/tolerance.h)
//    "inputs": [{"name": "x", "shape": ["B", "T", 2048], "integers": false}],
//    "parameters": [{"name": "q_proj.weight", "shape": [..], "trained": true, "alias": "wq", "transposed": true,
//                    "init": {"rule": "normal", "a": 0, "b": 0.02}, "doc": ""}],
//    "steps": [{"name": "q_proj", "kind": "op", "op": "dense", "output": "out", "inputs": {"x": REF, "weight": REF},
//               "options": {}, "shape": ["B", "T", 1536], "acc": false, "state": ["q_conv1d.state"]},
//              {"name": "g", "kind": "map", "expression": "-exp(A_log) * softplus(a + dt_bias)", "inputs": {..}, ..},
//              {"name": "q_conv1d_2", "kind": "view", "view": "split", "begin": 0, "size": 6, "stride": 1, ..},
//              {"name": "concat", "kind": "concat", "interleaved": false, ..}],
//    "output": REF, "decode": true, "why_not": "", "states": [{"name": "q_conv1d.state", "step": .., "shape": ["B", ..]}],
//    "parameter_count": 123}
//
// REF is {"input": name}, {"parameter": name}, {"step": name}, {"constant": number, "shape": [..]} or {"table": [numbers]}.
// Steps stand in the order in which they run. `position` in an expression is the number of the token, from 0, along T.
// acc: a value that stays in f32 in a module of lower precision. A capacity in a state's shape is "capacity".
#pragma once

#include <string>

#include "core/files/json.h"
#include "layers/layer.h"
#include "layers/record.h"

namespace linnet::layers {

void describe(const Record& record, JsonWriter& json);  // the members from "tokens" on, inside an open object
// One object; a sentence when the options do not fit the layer.
Status layer_json(const Layer& layer, const std::vector<Setting>& options, int indent, std::string* text);
// {"layers": [...]}: every layer with its options alone, at their defaults.
std::string layers_json(int indent = 0);
void describe_options(const Layer& layer, const std::vector<Setting>& values, JsonWriter& json);  // an array

}  // namespace linnet::layers
