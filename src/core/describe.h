// Declarations as JSON: what Python, other languages and `linnet info --json` know about an operator.
//
//   {"name": "softmax", "mechanism": "softmax", "summary": ..., "equation": ..., "decode": "softmax_decode",
//    "differentiable": true,
//    "inputs":  [{"name": "q", "shape": ["B", "Tq", "H", "K"], "element": "io", "values": "normal", "optional": false, ...}],
//    "outputs": [{"name": "lse", "shape": ["B", "Tq", "H"], "element": "acc", "optional": true, "saved": true, ...}],
//    "options": [{"name": "scale", "kind": "maybe_real", "default": null, "low": null, "high": null, "doc": ...}],
//    "letters": [{"letter": "F", "by": "map", "cases": [["elu1", "K"], ...]}],  "multiples": [["H", "Hkv"]],
//    "implementations": [{"name": "ref", "backward": true, "usable": true, "reason": ""}]}
//
// A bound that limits nothing and a letter rule that depends on no option are null.
#pragma once

#include <string>

#include "json.h"
#include "op.h"

namespace linnet {

void describe(const Op& op, JsonWriter& json);  // one object
std::string describe_json(const Op& op, int indent = 0);
// {"version": ..., "ops": [...]} with every operator.
std::string describe_json(int indent = 0);

}  // namespace linnet
