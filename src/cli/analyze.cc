// linnet analyze: mixers as dynamical systems, the theory of in-context learning, and the heads of a model.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <fstream>

#include "analysis/dsf.h"
#include "analysis/icl_curves.h"
#include "analysis/icl_train.h"
#include "analysis/model.h"
#include "analysis/taps.h"
#include "analysis/vector_slice.h"
#include "cli/command.h"
#include "cli/model.h"
#include "cli/print.h"
#include "convert/convert.h"
#include "core/files/file.h"
#include "core/files/json.h"
#include "core/files/safetensors.h"

namespace linnet::cli {
namespace {

using namespace analysis;

Status split_word(const std::string& word, std::string* name, std::string* value) {
  const size_t equals = word.find('=');
  *name = word.substr(0, equals);
  *value = equals == std::string::npos ? "" : word.substr(equals + 1);
  return {};
}

// A place where nothing can be written is told before the work.
Status try_output(const std::string& path) {
  if (path.empty()) return {};
  OutputFile tried;
  return OutputFile::create(path, tried);
}

Status write_tensors(const std::string& path, const std::vector<SystemReport>& reports) {
  std::vector<SafetensorsTensor> entries;
  std::vector<std::vector<int64_t>> lengths;
  lengths.reserve(reports.size());
  for (const SystemReport& r : reports) {
    const std::string stem = reports.size() > 1 ? r.mixer + "." : "";
    const int64_t T = r.system.T;
    lengths.push_back(r.memory_length);
    entries.push_back({stem + "mixing", "F64", {T, T}, r.mixing.values.data()});
    entries.push_back(
        {stem + "singular_values", "F64", {static_cast<int64_t>(r.singular_values.size())}, r.singular_values.data()});
    const int64_t own = T == 0 ? 0 : static_cast<int64_t>(r.eig_real.size()) / T;
    entries.push_back({stem + "eig_real", "F64", {T, own}, r.eig_real.data()});
    entries.push_back({stem + "eig_imag", "F64", {T, own}, r.eig_imag.data()});
    entries.push_back({stem + "memory_length", "I64", {T}, lengths.back().data()});
    for (const auto& [name, values] : {std::pair{"spectral_radius", &r.spectral_radius}, std::pair{"row_sum", &r.row_sum},
                                       std::pair{"entropy", &r.entropy}, std::pair{"mean_distance", &r.mean_distance},
                                       std::pair{"local_mass", &r.local_mass}, std::pair{"negative_mass", &r.negative_mass}}) {
      entries.push_back({stem + name, "F64", {T}, values->data()});
    }
  }
  return write_safetensors(path, entries, {{"made_by", "linnet analyze dsf"}});
}

// A call's file as it is; the call inside a layer's file.
Status read_file_slice(const std::string& path, int64_t batch, int64_t head, MixerInputs* inputs, std::string* mixer) {
  const Status status = read_slice(path, batch, head, inputs, mixer);
  SafetensorsFile file;
  if (status.ok() || !SafetensorsFile::open(path, file).ok()) return status;
  const bool h3 = file.metadata("mechanism") == "h3";
  if (!h3 && file.metadata("operator").find("layer") == std::string::npos) return status;
  OpTaps taps;
  LINNET_TRY(h3 ? taps_of_h3_file(path, batch, &taps) : taps_of_layer_file(path, &taps));
  const Status found = mixer_of_taps(taps, head, inputs, mixer);
  return found.ok() ? found : bad_input(path + ": " + found.message());
}

// Table or JSON, tensors, page.
int show_systems(const Arguments& args, const std::vector<SystemReport>& reports, const std::string& title) {
  bool failed = false;
  for (const SystemReport& r : reports) failed |= !r.ok();
  if (args.has("json")) {
    std::printf("%s\n", report_json(reports).c_str());
  } else {
    std::vector<Column> columns;
    for (const std::string& name : report_heading()) columns.push_back({name, columns.empty() ? Align::left : Align::right});
    Table table(columns);
    for (const SystemReport& r : reports) table.row(report_row(r));
    table.print(stdout);
    for (const SystemReport& r : reports) {
      if (r.system.cache) {
        std::printf("%s: the cache also holds the keys: %lld numbers in all, and grows with every token\n", r.mixer.c_str(),
                    static_cast<long long>(r.cache_size));
      }
      if (r.system.restarts > 0) {
        std::printf("%s: the normaliser is 0 at %lld tokens, which read nothing\n", r.mixer.c_str(),
                    static_cast<long long>(r.system.restarts));
      }
      if (!r.ok()) std::printf("%s: FAIL: the system does not reproduce the mixer\n", r.mixer.c_str());
    }
    if (reports.size() == 2) {
      std::printf("\n");
      for (const std::string& line : differences(reports[0], reports[1])) std::printf("- %s\n", line.c_str());
    }
  }
  if (const std::string out = args.text("out"); !out.empty()) {
    if (const Status status = write_tensors(out, reports); !status.ok()) return fail(status);
  }
  if (const std::string html = args.text("html"); !html.empty()) {
    if (const Status status = write_file(html, report_page(reports, title)); !status.ok()) return fail(status);
    if (!args.has("json")) std::printf("\nwrote %s\n", html.c_str());
  }
  return failed ? kCheckFailed : kDone;
}

int analyze_dsf(const Arguments& args, const std::vector<std::string>& rest) {
  MixerSize size;
  SystemSetting setting;
  int64_t seed = 1, batch = 0, head = 0;
  std::vector<std::string> mixers;
  std::vector<std::pair<std::string, std::string>> words;
  for (size_t i = 1; i < rest.size(); ++i) {
    if (rest[i].find('=') == std::string::npos) {
      if (find_mixer(rest[i]) == nullptr) {
        const std::string hint = did_you_mean(rest[i], mixer_names());
        return fail(bad_input("analyze: there is no mixer '" + rest[i] + "'" +
                              (hint.empty() ? "; linnet analyze dsf lists them" : hint)));
      }
      mixers.push_back(find_mixer(rest[i])->name);
    } else {
      words.emplace_back();
      (void)split_word(rest[i], &words.back().first, &words.back().second);
      if (const std::vector<std::string> known = {"scale", "order", "feature", "gamma", "power", "reverse_power", "forget_gate",
                                                  "d", "discretise"};
          std::find(known.begin(), known.end(), words.back().first) == known.end()) {
        return fail(bad_input("analyze: there is no option '" + words.back().first + "'" +
                              did_you_mean(words.back().first, known) +
                              "; there are scale, order, feature, gamma, power, reverse_power, forget_gate, d and discretise"));
      }
    }
  }
  for (const Status& status :
       {args.integer("tokens", 0, kMaxAnalysed, &size.tokens), args.integer("keys", 1, 1024, &size.keys),
        args.integer("values", 1, 1024, &size.values), args.integer("seed", 0, int64_t{1} << 53, &seed),
        args.integer("window", 1, 1'000'000, &setting.window), args.integer("batch", 0, 1'000'000, &batch),
        args.integer("head", 0, 1'000'000, &head), try_output(args.text("html")), try_output(args.text("out"))}) {
    if (!status.ok()) return fail(status);
  }
  const std::string path = args.text("file");
  if (mixers.empty() && path.empty()) {
    Table table({{"mixer"}, {"what it is"}, {"L_t"}, {"reads"}});
    for (const Mixer& mixer : all_mixers()) table.row({mixer.name, mixer.what, mixer.form, mixer.tensors});
    table.print(stdout);
    std::printf(
        "\nlinnet analyze dsf MIXER [MIXER ...] analyses them on random tokens; --file FILE on those of a vector file.\n");
    return kDone;
  }
  MixerInputs given;
  std::string named;
  if (!path.empty()) {
    if (const Status status = read_file_slice(path, batch, head, &given, &named); !status.ok()) return fail(status);
    if (mixers.empty()) {
      const Mixer* guessed = guess_mixer(named, given);
      if (guessed == nullptr) {
        return fail(bad_input("analyze: " + path + " does not say which mixer its tensors belong to: name one"));
      }
      mixers.push_back(guessed->name);
    }
  }
  std::vector<SystemReport> reports;
  Progress progress("mixers", static_cast<int64_t>(mixers.size()));
  for (size_t i = 0; i < mixers.size(); ++i) {
    progress.at(static_cast<int64_t>(i));
    MixerInputs inputs = given;
    if (path.empty()) {
      if (const Status status = random_inputs(mixers[i], size, static_cast<uint64_t>(seed), &inputs); !status.ok())
        return fail(status);
    }
    for (const auto& [name, value] : words) inputs.words[name] = value;
    if (const Status status = analyse(mixers[i], inputs, setting, &reports.emplace_back()); !status.ok()) return fail(status);
  }
  progress.clear();
  std::string title;
  for (const std::string& mixer : mixers) title += (title.empty() ? "" : ", ") + mixer;
  const int code = show_systems(args, reports, title);
  if (!args.has("json")) {
    for (const SystemReport& r : reports) {
      if (r.mixer != "softmax" && r.mixer != "linear" && r.mixer != "taylor") continue;
      MixerInputs inputs = given;
      if (path.empty()) (void)random_inputs(r.mixer, size, static_cast<uint64_t>(seed), &inputs);
      for (const auto& [name, value] : words) inputs.words[name] = value;
      Injectivity map;
      if (r.system.T > 256 || !injectivity(r.mixer, inputs, &map).ok()) continue;
      std::string factors;
      for (const double factor : map.same_factors) factors += (factors.empty() ? "" : ", ") + number(factor, 2);
      std::printf("%s: of %lld pairs of queries %lld have the same weights%s; dw/dq has rank %lld\n", r.mixer.c_str(),
                  static_cast<long long>(map.pairs), static_cast<long long>(map.collisions),
                  factors.empty() ? "" : (", and so has every query times " + factors).c_str(),
                  static_cast<long long>(map.jacobian_rank));
    }
  }
  return code;
}

template <class T>
Status read_number(const std::string& name, const std::string& text, T* value) {
  const auto [stop, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  if (error != std::errc() || stop != text.data() + text.size())
    return bad_input("analyze: " + name + " is '" + text + "', expected a number");
  return {};
}

Status read_covariances(const std::string& path, IclSetting* o) {
  SafetensorsFile file;
  LINNET_TRY(SafetensorsFile::open(path, file));
  for (const auto& [name, to] :
       {std::pair{"Sx", &o->prompts.Sx}, std::pair{"Sb", &o->prompts.Sb}, std::pair{"Sb_new", &o->Sb_new}}) {
    if (!file.has(name)) continue;
    SafetensorsEntry entry;
    LINNET_TRY(file.find(name, entry));
    if (entry.shape.size() != 2)
      return bad_input(path + ": " + name + " has rank " + std::to_string(entry.shape.size()) + ", expected 2");
    to->rows = entry.shape[0];
    to->cols = entry.shape[1];
    LINNET_TRY(file.read_f64(name, to->values));
  }
  if (o->prompts.Sx.rows == 0) return bad_input(path + ": it has no tensor Sx, the covariance of the features");
  o->d = o->prompts.Sx.rows;
  return {};
}

Status read_icl(const Arguments& args, const std::vector<std::string>& rest, IclSetting* o, IclTraining* training,
                std::vector<std::string>* names) {
  if (args.has("train")) o->n = {5, 10, 20, 40};
  if (const std::string path = args.text("file"); !path.empty()) LINNET_TRY(read_covariances(path, o));
  o->rank = std::min(o->rank, o->d);
  for (size_t i = 1; i < rest.size(); ++i) {
    std::string name, value;
    LINNET_TRY(split_word(rest[i], &name, &value));
    if (rest[i].find('=') == std::string::npos) {
      names->push_back(name);
    } else if (name == "d") {
      LINNET_TRY(read_number(name, value, &o->d));
      if (o->d < 1 || o->d > 1000) return bad_input("analyze: d is " + value + ", expected 1 to 1000");
      if (o->prompts.Sx.rows > 0) return bad_input("analyze: d is given, but --file has it already");
      o->rank = std::min(o->rank, o->d);
    } else if (name == "rank") {
      LINNET_TRY(read_number(name, value, &o->rank));
    } else if (name == "noise") {
      LINNET_TRY(read_number(name, value, &o->noise));
    } else if (name == "drift") {
      LINNET_TRY(read_number(name, value, &o->drift));
    } else if (name == "alpha") {
      LINNET_TRY(read_number(name, value, &o->alpha));
    } else if (name == "spectrum") {
      LINNET_TRY(read_number(name, value, &o->spectrum));
    } else if (args.has("train") && name == "steps") {
      LINNET_TRY(read_number(name, value, &training->steps));
    } else if (args.has("train") && name == "batch") {
      LINNET_TRY(read_number(name, value, &training->batch));
    } else if (args.has("train") && name == "rate") {
      LINNET_TRY(read_number(name, value, &training->rate));
    } else if (name == "n") {
      o->n.clear();
      for (size_t at = 0; at <= value.size();) {
        const size_t end = std::min(value.find(',', at), value.size());
        LINNET_TRY(read_number(name, value.substr(at, end - at), &o->n.emplace_back()));
        at = end + 1;
      }
    } else {
      return bad_input("analyze: there is no option '" + name + "'" +
                       did_you_mean(name, {"d", "rank", "noise", "drift", "alpha", "spectrum", "n", "steps", "batch", "rate"}) +
                       "; there are d, rank, noise, drift, alpha, spectrum and n, and with --train steps, batch and rate");
    }
  }
  if (names->empty()) {
    for (const auto& formula : icl_formulas()) names->push_back(formula.first);
  }
  return {};
}

std::string icl_text(const IclSetting& o, int64_t d) {
  return "d " + std::to_string(d) + ", noise " + number(o.noise, 4) + ", rank " + std::to_string(o.rank) + ", drift " +
         number(o.drift, 4) + ", alpha " + number(o.alpha, 4) + ", spectrum " + number(o.spectrum, 4);
}

void icl_json(const IclSetting& o, const std::vector<IclCurve>& curves, const std::vector<IclMeasured>& measured) {
  JsonWriter json(2);
  json.begin_object().member("kind", "icl").member("d", curves.front().d).member("noise", o.noise).member("rank", o.rank);
  json.member("drift", o.drift).member("alpha", o.alpha).member("spectrum", o.spectrum).key("n").begin_array();
  for (const int64_t n : o.n) json.value(n);
  json.end_array().key("losses").begin_object();
  for (const IclCurve& curve : curves) {
    json.key(curve.name).begin_array();
    for (const double loss : curve.loss) json.value(loss);
    json.end_array();
  }
  json.end_object().key("trained").begin_array();
  for (const IclMeasured& m : measured) {
    json.begin_object().member("formula", m.name).member("layer", m.layer).member("n", m.n).member("theory", m.theory);
    json.member("loss", m.loss)
        .member("deviation", m.deviation)
        .member("off", m.off())
        .member("starts", m.tries)
        .member("step_cosine", m.alignment);
    json.key("filter_cosine");
    m.layer == "h3" ? json.value(m.filter) : json.value(nullptr);
    json.end_object();
  }
  std::printf("%s\n", json.end_array().end_object().text().c_str());
}

// The layers of the formulas that were asked for, trained at every n.
Status train_icl(const IclSetting& o, const std::vector<std::string>& names, const IclTraining& training,
                 std::vector<IclMeasured>* measured) {
  std::vector<std::pair<std::string, std::string>> list;
  for (const auto& each : icl_experiments()) {
    if (std::find(names.begin(), names.end(), each.first) != names.end()) list.push_back(each);
  }
  if (list.empty()) return bad_input("analyze: nothing to train: the limits of many dimensions are formulas only");
  Progress progress("layers", static_cast<int64_t>(list.size() * o.n.size()));
  for (const auto& [name, layer] : list) {
    for (const int64_t n : o.n) {
      progress.at(static_cast<int64_t>(measured->size()));
      LINNET_TRY(icl_experiment(name, layer, o, n, training, &measured->emplace_back()));
    }
  }
  progress.clear();
  return {};
}

int analyze_icl(const Arguments& args, const std::vector<std::string>& rest) {
  IclSetting o;
  IclTraining training;
  std::vector<std::string> names;
  int64_t seed = 1;
  for (const Status& status : {read_icl(args, rest, &o, &training, &names), args.integer("seed", 0, int64_t{1} << 40, &seed),
                               try_output(args.text("html"))}) {
    if (!status.ok()) return fail(status);
  }
  training.seed = static_cast<uint64_t>(seed);
  std::vector<IclCurve> curves;
  for (const std::string& name : names) {
    if (const Status status = icl_curve(name, o, &curves.emplace_back()); !status.ok()) return fail(status);
  }
  std::vector<IclMeasured> measured;
  if (args.has("train")) {
    if (const Status status = train_icl(o, names, training, &measured); !status.ok()) return fail(status);
  }
  bool missed = false;
  for (const IclMeasured& m : measured) missed |= std::abs(m.off()) > kIclAgreement;
  const std::string setting = icl_text(o, curves.front().d);
  if (args.has("json")) {
    icl_json(o, curves, measured);
  } else if (!measured.empty()) {
    std::printf("one layer, %lld steps of %lld prompts: %s\n\n", static_cast<long long>(training.steps),
                static_cast<long long>(training.batch), setting.c_str());
    Table table({{"formula"},
                 {"layer"},
                 {"n", Align::right},
                 {"theory", Align::right},
                 {"trained", Align::right},
                 {"+-", Align::right},
                 {"off", Align::right},
                 {"starts", Align::right},
                 {"cosine of W", Align::right},
                 {"of the filter", Align::right}});
    for (const IclMeasured& m : measured) {
      table.row({m.name, m.layer, std::to_string(m.n), number(m.theory, 5), number(m.loss, 5), number(m.deviation, 2),
                 number(100 * m.off(), 2) + " %", std::to_string(m.tries), number(m.alignment, 4),
                 m.layer == "h3" ? number(m.filter, 4) : "-"});
    }
    table.print(stdout);
    if (missed) {
      std::printf("\nFAIL: a layer is more than %s %% off its theory; more steps or another rate may help\n",
                  number(100 * kIclAgreement, 2).c_str());
    }
  } else {
    std::printf("loss of one layer at its best, label noise included: %s\n\n", setting.c_str());
    std::vector<Column> columns = {{"n", Align::right}};
    for (const IclCurve& curve : curves) columns.push_back({curve.name, Align::right});
    Table table(columns);
    for (size_t j = 0; j < o.n.size(); ++j) {
      std::vector<std::string> row = {std::to_string(o.n[j])};
      for (const IclCurve& curve : curves) row.push_back(number(curve.loss[j], 5));
      table.row(row);
    }
    table.print(stdout);
    std::printf("\n");
    for (const IclCurve& curve : curves) std::printf("%s: %s\n", curve.name.c_str(), curve.formula.c_str());
  }
  if (const std::string html = args.text("html"); !html.empty()) {
    const std::string page = icl_page(curves, measured, "In-context linear estimation", setting);
    if (const Status status = write_file(html, page); !status.ok()) return fail(status);
    if (!args.has("json")) std::printf("\nwrote %s\n", html.c_str());
  }
  return missed ? kCheckFailed : kDone;
}

// The most tokens that may be asked for: positions that are computed go on behind the model's context.
constexpr int64_t kMostTokens = 1 << 20;
int64_t most_tokens(const Model& model, const LayeredModel& parts) {
  return parts.goes_beyond() ? std::max<int64_t>(kMostTokens, model.context()) : model.context();
}

void say_beyond(const Model& model, int64_t tokens) {
  if (tokens <= model.context()) return;
  std::fprintf(stderr, "note: the model was made for %lld tokens; what stands behind them is beyond its training\n",
               static_cast<long long>(model.context()));
}

// The text of --text, as far as --tokens asks, embedded: x [T, hidden].
Status embed_text(const Arguments& args, const Model& model, const LayeredModel& parts, int64_t length, std::vector<float>& x) {
  std::vector<convert::Sample> samples;
  if (model.summary().images || (!model.has_tokenizer() && !args.has("text"))) {  // a model of a task has no texts
    samples = convert::random_samples(model, length, 1, 0);
    return convert::embed(parts, samples[0], x);
  }
  if (!args.has("text")) return bad_input("analyze: which text? --text FILE");
  if (!model.has_tokenizer()) return bad_input(model.summary().path + ": has no tokenizer.json, which reading a text needs");
  std::string text;
  LINNET_TRY(read_file(args.text("text"), uint64_t{4} << 30, text));
  if (const size_t bad = find_invalid_utf8(text); bad != text.size()) {
    return bad_input(args.text("text") + ": is not UTF-8 at byte " + std::to_string(bad));
  }
  samples = convert::samples_of(model, text, length, length);
  if (samples.empty() || samples[0].tokens.size() < 2) return bad_input(args.text("text") + ": has fewer than 2 tokens");
  return convert::embed(parts, samples[0], x);
}

// Windows that are shorter than the text; those that were asked for must be.
Status choose_windows(const Arguments& args, int64_t tokens, std::vector<int64_t>* windows) {
  const std::string text = args.text("windows");
  if (!text.empty()) windows->clear();
  for (size_t at = 0; !text.empty() && at <= text.size();) {
    const size_t end = std::min(text.find(',', at), text.size());
    LINNET_TRY(read_number("--windows", text.substr(at, end - at), &windows->emplace_back()));
    if (windows->back() < 1)
      return bad_input("analyze: --windows has " + std::to_string(windows->back()) + ", expected at least 1");
    at = end + 1;
  }
  const int64_t least = *std::min_element(windows->begin(), windows->end());
  for (const int64_t w : *windows) {
    if (w >= tokens && (!text.empty() || w == least)) {
      return bad_input("analyze: the text has " + std::to_string(tokens) + " tokens, no more than the window of " +
                       std::to_string(w) + "; take a longer text or smaller --windows");
    }
  }
  std::erase_if(*windows, [&](int64_t w) { return w >= tokens; });
  return {};
}

// One head of a layer as a dynamical system, and other mixers on the same queries, keys and values.
int analyze_layer(const Arguments& args, const Model& model) {
  const LayeredModel parts(model);
  SystemSetting setting;
  int64_t tokens = std::min<int64_t>(256, model.context()), layer = 0, head = 0;
  for (const Status& status :
       {args.integer("tokens", 2, std::min<int64_t>(kMaxAnalysed, most_tokens(model, parts)), &tokens),
        args.integer("layer", 0, 1'000'000, &layer), args.integer("head", 0, 1'000'000, &head),
        args.integer("window", 1, 1'000'000, &setting.window), try_output(args.text("html")), try_output(args.text("out"))}) {
    if (!status.ok()) return fail(status);
  }
  std::vector<float> x;
  MixerInputs inputs;
  std::string own;
  analysis::KernelRead kernel;
  if (const Status status = embed_text(args, model, parts, tokens, x); !status.ok()) return fail(status);
  say_beyond(model, static_cast<int64_t>(x.size()) / parts.hidden());
  if (const Status status = model_mixer(parts, x, layer, head, &inputs, &own, &kernel); !status.ok())
    return fail(Status(status.code(), model.summary().path + ": " + status.message()));
  std::vector<std::string> mixers = {own};
  for (size_t i = 1; i < args.rest().size(); ++i) {
    const Mixer* mixer = find_mixer(args.rest()[i]);
    if (mixer == nullptr)
      return fail(
          bad_input("analyze: there is no mixer '" + args.rest()[i] + "'" + did_you_mean(args.rest()[i], mixer_names())));
    mixers.push_back(mixer->name);
  }
  std::vector<SystemReport> reports;
  for (const std::string& mixer : mixers) {
    MixerInputs given = inputs;
    if (mixer != own) given.words.erase("feature");
    if (const Status status = analyse(mixer, given, setting, &reports.emplace_back()); !status.ok()) return fail(status);
  }
  const std::string title = model.summary().path + ", layer " + std::to_string(layer) + ", head " + std::to_string(head);
  const int code = show_systems(args, reports, title);
  if (!args.has("json")) {
    std::printf("\n%s is %s on %lld tokens; the model's own kernel gives the system's output within %s of its size\n",
                title.c_str(), own.c_str(), static_cast<long long>(reports[0].system.T),
                scientific(analysis::kernel_error(reports[0], kernel)).c_str());
  }
  return code;
}

void print_heads(const JsonValue& json) {
  const std::vector<std::vector<std::string>> rows = analysis::model_rows(json, 4);
  std::vector<size_t> plain, kl;
  for (size_t i = 0; i < rows[0].size(); ++i) {
    if (rows[0][i].rfind("margin_", 0) != 0) (rows[0][i].rfind("kl_", 0) == 0 ? kl : plain).push_back(i);
  }
  std::vector<Column> columns;
  for (const size_t i : plain) columns.push_back({rows[0][i], Align::right});
  columns.push_back({"least kl"});
  Table table(columns);
  for (size_t r = 1; r < rows.size(); ++r) {
    std::vector<std::string> cells;
    for (const size_t i : plain) cells.push_back(rows[r][i]);
    std::string best = "-";
    double least = HUGE_VAL;
    for (const size_t i : kl) {
      const double x = rows[r][i] == "-" ? HUGE_VAL : std::atof(rows[r][i].c_str());
      if (x < least) least = x, best = number(x, 2) + " " + rows[0][i].substr(3);
    }
    cells.push_back(best);
    table.row(cells);
  }
  if (rows.size() > 1) table.print(stdout);
}

void print_rest(const ModelReport& report) {
  const LayerActivity* top = nullptr;
  for (const LayerActivity& a : report.layers) {
    if (top == nullptr || a.largest / std::max(a.median, 1e-300) > top->largest / std::max(top->median, 1e-300)) top = &a;
  }
  if (!report.recurrent.empty()) {
    Table table({{"layer", Align::right},
                 {"head", Align::right},
                 {"mixer"},
                 {"states", Align::right},
                 {"eigenvalues", Align::right},
                 {"memory", Align::right},
                 {"semiseparable rank", Align::right},
                 {"local mass", Align::right},
                 {"class"},
                 {"kernel error", Align::right}});
    for (const RecurrentHead& h : report.recurrent) {
      const SystemReport& s = h.system;
      double memory = 0, local = 0;
      for (const int64_t each : s.memory_length)
        memory += static_cast<double>(each) / static_cast<double>(s.memory_length.size());
      for (const double each : s.local_mass) local += each / static_cast<double>(s.local_mass.size());
      table.row({std::to_string(h.layer), std::to_string(h.head), s.mixer, std::to_string(s.state_size),
                 number(s.radius_low, 3) + " to " + number(s.radius_high, 3), number(memory, 3),
                 std::to_string(s.semiseparable_rank), number(local, 2), s.row_class, scientific(h.kernel_error)});
    }
    std::printf("%s", report.heads.empty() ? "" : "\n");
    table.print(stdout);
  }
  if (top != nullptr) {
    std::printf("\nlargest activation: %s behind layer %lld (token %lld, channel %lld), %s times the median there\n",
                number(top->largest, 4).c_str(), static_cast<long long>(top->index), static_cast<long long>(top->token),
                static_cast<long long>(top->channel), number(top->largest / std::max(top->median, 1e-300), 3).c_str());
  }
  for (const std::string& sentence : report.left_out) std::printf("%s\n", sentence.c_str());
}

int analyze_model(const Arguments& args) {
  Model model;
  if (const Status status = load_model("analyze", args, model); !status.ok()) return fail(status);
  if (args.has("layer")) return analyze_layer(args, model);
  if (args.rest().size() > 1)
    return fail(
        bad_input("analyze: '" + args.rest()[1] + "' is one word too many; other mixers stand beside a layer: --layer N"));
  const LayeredModel parts(model);
  HeadOptions options;
  options.spectra = options.cheaper = true;
  int64_t length = std::min<int64_t>(model.context(), model.summary().causal ? 2048 : 512);
  std::vector<float> x;
  for (const Status& status : {args.integer("tokens", 16, most_tokens(model, parts), &length),
                               args.integer("sinks", 0, 65536, &options.sinks), args.real("apart", 0, 1e30, &options.apart),
                               args.real("alike", 0, 2, &options.alike), args.integer("rows", 1, 1'000'000, &options.rows),
                               args.integer("samples", 16, 8192, &options.samples), try_output(args.text("html"))}) {
    if (!status.ok()) return fail(status);
  }
  if (const Status status = embed_text(args, model, parts, length, x); !status.ok()) return fail(status);
  if (const Status status = choose_windows(args, static_cast<int64_t>(x.size()) / parts.hidden(), &options.windows);
      !status.ok())
    return fail(status);
  say_beyond(model, static_cast<int64_t>(x.size()) / parts.hidden());
  ModelReport report;
  report.path = model.summary().path;
  {
    Progress progress("layers", parts.layers());
    const Status status = analyse_model(
        parts, std::move(x), options, [&](int64_t layer) { progress.at(layer); }, &report);
    if (!status.ok()) return fail(Status(status.code(), report.path + ": " + status.message()));
  }
  if (report.heads.empty() && report.recurrent.empty()) {
    std::string why;
    for (const std::string& sentence : report.left_out) why += why.empty() ? sentence : "";
    return fail(bad_input(report.path + ": has no attention to look into" + (why.empty() ? "" : ": " + why)));
  }
  const std::string text = analysis::model_json(report);
  JsonValue json;
  if (const Status status = parse_json(text, "the report", {.max_bytes = uint64_t{1} << 30}, json); !status.ok())
    return fail(status);
  if (args.has("json")) {
    std::printf("%s\n", text.c_str());
  } else if (args.has("csv")) {
    for (const std::vector<std::string>& row : analysis::model_rows(json, 9)) {
      std::string line;
      for (const std::string& cell : row) line += (line.empty() ? "" : ",") + (cell == "-" ? std::string() : cell);
      std::printf("%s\n", line.c_str());
    }
  } else {
    print_heads(json);
    print_rest(report);
    if (model.summary().images) {
      std::printf("\nmeasured on a random image\n");
    } else if (!args.has("text")) {
      std::printf("\nmeasured on random tokens: the model has no tokenizer\n");
    }
  }
  if (const std::string html = args.text("html"); !html.empty()) {
    if (const Status status = write_file(html, analysis::model_page(json)); !status.ok()) return fail(status);
    if (!args.has("json") && !args.has("csv")) std::printf("\nwrote %s\n", html.c_str());
  }
  return kDone;
}

int analyze_main(const Arguments& args) {
  const std::vector<std::string>& rest = args.rest();
  if (rest.empty())
    return fail(
        bad_input("analyze: it needs a subject: dsf (mixers as dynamical systems), icl (in-context learning), or a model"));
  if (rest[0] == "dsf") return analyze_dsf(args, rest);
  if (rest[0] == "icl") return analyze_icl(args, rest);
  if (is_model_path(rest[0])) return analyze_model(args);
  return fail(bad_input("analyze: there is no '" + rest[0] + "', expected dsf or icl" + did_you_mean(rest[0], {"dsf", "icl"})));
}

}  // namespace

const Command& analyze_command() {
  static const Command command = {
      .name = "analyze",
      .summary =
          "mixers as dynamical systems (dsf), what one layer can learn in context (icl), the heads of a model; table and page",
      .usage = "dsf [MIXER ...] [option=value ...] | icl [FORMULA ...] [option=value ...] | MODEL [MIXER ...] --text FILE",
      .details =
          "dsf writes attention, state space models and gated recurrences as h = L h + B u, y = C h + D u, shows that the "
          "system gives\n"
          "what the mixer gives, and reports state, eigenvalues, memory, ranks and rows. Without a mixer it lists them.\n\n"
          "  linnet analyze dsf softmax linear gla gated_delta s6 --tokens 128 --keys 8 --html mixers.html\n"
          "  linnet analyze dsf linear normalised                       two mixers: what separates them\n"
          "  linnet analyze dsf taylor order=4\n"
          "  linnet analyze dsf --file tests/vectors/gla-plain.safetensors --head 1\n\n"
          "icl gives the loss of one layer of linear attention or H3 on linear regression in context, in closed form.\n\n"
          "  linnet analyze icl d=20 noise=0.1 n=10,20,40,80 --html icl.html\n"
          "  linnet analyze icl drift_attention drift_h3 drift=0.9\n"
          "  linnet analyze icl --train d=5 n=10,20,40 --html icl.html           trains the layers and compares\n\n"
          "A model (a folder or a GGUF file) with a text: what each head does there: entropy, distance, weight on windows and "
          "first\n"
          "keys, ranks, degrees of freedom, and the KL that each cheaper mechanism would cost; massive activations; heads "
          "without\n"
          "softmax as dynamical systems. With --layer one head of a layer as a system, and other mixers on the same tokens.\n\n"
          "  linnet analyze model.gguf --text text.txt --tokens 8192 --html heads.html\n"
          "  linnet analyze model.gguf --text text.txt --csv > heads.csv\n"
          "  linnet analyze model.gguf linear taylor --text text.txt --layer 3 --head 2",
      .options = {{"tokens", "N", "random tokens (default 64, at most 2048); a model: tokens of the text (default 2048)"},
                  {"keys", "N", "width of keys, or states of a channel (default 8)"},
                  {"values", "N", "width of values, or channels (default 4)"},
                  {"seed", "N", "of the random tokens (default 1)"},
                  {"window", "N", "of the local mass (default 16)"},
                  {"file", "FILE", "dsf: a vector file instead of random tokens; icl: Sx, Sb, Sb_new"},
                  {"batch", "N", "row of the file's batch (default 0)"},
                  {"head", "N", "head of the file (default 0)"},
                  {"train", "", "icl: train each layer and compare it with its formula (steps=3000 batch=256 rate=0.01)"},
                  {"out", "FILE", "dsf: write the tensors as safetensors"},
                  {"html", "FILE", "write one self-contained page with plots"},
                  {"text", "FILE", "a model: a UTF-8 text"},
                  {"layer", "N", "a model: one layer as a dynamical system"},
                  {"windows", "LIST", "a model: widths, with commas (default 64,128,512)"},
                  {"rows", "N", "a model: sampled queries of a head (default 128)"},
                  {"samples", "N", "a model: queries and keys of a head for the degrees of freedom (default 1024)"},
                  {"sinks", "N", "a model: first keys (default 4)"},
                  {"apart", "X", "a model: queries further apart than this (default 1e-3)"},
                  {"alike", "X", "a model: are confused where their weights differ by less than this (default 1e-3)"},
                  {"weights", "KIND", "a model: f32, bf16, q8 or q4 (default: as in the file)"},
                  {"threads", "N", "a model: threads (default: one per core)"},
                  {"csv", "", "a model: print comma-separated values"},
                  {"json", "", "print JSON"}},
      .run = analyze_main,
  };
  return command;
}

}  // namespace linnet::cli
