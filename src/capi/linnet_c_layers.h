// Layers from C: their options, parameters, steps and states as data (`linnet info LAYER`).
//
//   linnet_option options[] = {{"hidden", "1024"}, {"heads", "4"}};
//   size_t needed = 0;
//   linnet_layer_json("gated_deltanet", options, 2, NULL, 0, &needed, message, sizeof message);
//   char* json = malloc(needed);
//   linnet_layer_json("gated_deltanet", options, 2, json, needed, &needed, message, sizeof message);
#ifndef LINNET_C_LAYERS_H_
#define LINNET_C_LAYERS_H_

#include "linnet_c.h"

#ifdef __cplusplus
extern "C" {
#endif

// All layers with their options as JSON, {"layers": [...]}; valid for the life of the process.
LINNET_API const char* linnet_describe_layers(void);
// One layer with these options, recorded: parameters with shapes and initial values, steps, states (src/layers/describe.h says
// what the members are). `needed` gets the bytes of the text with its final 0; nothing is written to `json` when it is shorter.
LINNET_API int linnet_layer_json(const char* layer, const linnet_option* options, int option_count, char* json,
                                 size_t json_bytes, size_t* needed, char* message, size_t message_bytes);

#ifdef __cplusplus
}
#endif

#endif
