// linnet analyze: mixers as dynamical systems, and the theory of in-context learning.
#include <algorithm>
#include <charconv>
#include <cstdio>
#include <fstream>

#include "analysis/dsf.h"
#include "analysis/heads.h"
#include "analysis/icl_curves.h"
#include "analysis/vector_slice.h"
#include "cli/command.h"
#include "cli/model.h"
#include "cli/print.h"
#include "convert/convert.h"
#include "core/file.h"
#include "core/json.h"
#include "core/safetensors.h"

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
                                                  "d"};
          std::find(known.begin(), known.end(), words.back().first) == known.end()) {
        return fail(bad_input("analyze: there is no option '" + words.back().first + "'" +
                              did_you_mean(words.back().first, known) +
                              "; there are scale, order, feature, gamma, power, reverse_power, forget_gate and d"));
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
    if (const Status status = read_slice(path, batch, head, &given, &named); !status.ok()) return fail(status);
    if (mixers.empty()) {
      const Mixer* guessed = guess_mixer(named, given);
      if (guessed == nullptr) {
        return fail(bad_input("analyze: " + path + " does not say which mixer its tensors belong to: name one"));
      }
      mixers.push_back(guessed->name);
    }
  }
  std::vector<SystemReport> reports;
  bool failed = false;
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
    failed |= !reports.back().ok();
  }
  progress.clear();
  if (args.has("json")) {
    std::printf("%s\n", report_json(reports).c_str());
  } else {
    std::vector<Column> columns;
    for (const std::string& title : report_heading()) columns.push_back({title, columns.empty() ? Align::left : Align::right});
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
  if (const std::string out = args.text("out"); !out.empty()) {
    if (const Status status = write_tensors(out, reports); !status.ok()) return fail(status);
  }
  if (const std::string html = args.text("html"); !html.empty()) {
    std::string title;
    for (const std::string& mixer : mixers) title += (title.empty() ? "" : ", ") + mixer;
    if (const Status status = write_file(html, report_page(reports, title)); !status.ok()) return fail(status);
    if (!args.has("json")) std::printf("\nwrote %s\n", html.c_str());
  }
  return failed ? kCheckFailed : kDone;
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

Status read_icl(const Arguments& args, const std::vector<std::string>& rest, IclSetting* o, std::vector<std::string>* names) {
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
    } else if (name == "n") {
      o->n.clear();
      for (size_t at = 0; at <= value.size();) {
        const size_t end = std::min(value.find(',', at), value.size());
        LINNET_TRY(read_number(name, value.substr(at, end - at), &o->n.emplace_back()));
        at = end + 1;
      }
    } else {
      return bad_input("analyze: there is no option '" + name + "'" +
                       did_you_mean(name, {"d", "rank", "noise", "drift", "alpha", "n"}) +
                       "; there are d, rank, noise, drift, alpha and n");
    }
  }
  if (names->empty()) {
    for (const auto& formula : icl_formulas()) names->push_back(formula.first);
  }
  return {};
}

int analyze_icl(const Arguments& args, const std::vector<std::string>& rest) {
  IclSetting o;
  std::vector<std::string> names;
  if (const Status status = read_icl(args, rest, &o, &names); !status.ok()) return fail(status);
  if (const Status status = try_output(args.text("html")); !status.ok()) return fail(status);
  std::vector<IclCurve> curves;
  for (const std::string& name : names) {
    if (const Status status = icl_curve(name, o, &curves.emplace_back()); !status.ok()) return fail(status);
  }
  const std::string setting = "d " + std::to_string(curves.front().d) + ", noise " + number(o.noise, 4) + ", rank " +
                              std::to_string(o.rank) + ", drift " + number(o.drift, 4) + ", alpha " + number(o.alpha, 4);
  if (args.has("json")) {
    JsonWriter json(2);
    json.begin_object().member("d", curves.front().d).member("noise", o.noise).member("rank", o.rank).member("drift", o.drift);
    json.member("alpha", o.alpha).key("n").begin_array();
    for (const int64_t n : o.n) json.value(n);
    json.end_array().key("losses").begin_object();
    for (const IclCurve& curve : curves) {
      json.key(curve.name).begin_array();
      for (const double loss : curve.loss) json.value(loss);
      json.end_array();
    }
    std::printf("%s\n", json.end_object().end_object().text().c_str());
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
    if (const Status status = write_file(html, icl_page(curves, "In-context linear estimation", setting)); !status.ok())
      return fail(status);
    if (!args.has("json")) std::printf("\nwrote %s\n", html.c_str());
  }
  return kDone;
}

// The heads of a pretrained model on a text.
Status heads_of(const Arguments& args, const Model& model, std::vector<HeadStatistics>& out, HeadOptions& options,
                int64_t& length) {
  length = std::min<int64_t>(model.context(), model.summary().causal ? 2048 : 512);
  LINNET_TRY(args.integer("tokens", 16, model.context(), &length));
  LINNET_TRY(args.integer("sinks", 0, 65536, &options.sinks));
  std::vector<convert::Sample> samples;
  if (model.summary().images) {
    samples = convert::random_samples(model, length, 1, 0);
  } else {
    if (!args.has("text")) return bad_input("analyze: which text? --text FILE");
    if (!model.has_tokenizer()) return bad_input(model.summary().path + ": has no tokenizer.json, which reading a text needs");
    std::string text;
    LINNET_TRY(read_file(args.text("text"), uint64_t{4} << 30, text));
    if (const size_t bad = find_invalid_utf8(text); bad != text.size()) {
      return bad_input(args.text("text") + ": is not UTF-8 at byte " + std::to_string(bad));
    }
    samples = convert::samples_of(model, text, length, length);
    if (samples.empty() || samples[0].tokens.size() < 2) return bad_input(args.text("text") + ": has fewer than 2 tokens");
    length = static_cast<int64_t>(samples[0].tokens.size());
  }
  const LayeredModel parts(model);
  std::vector<float> x, y;
  LINNET_TRY(convert::embed(parts, samples[0], x));
  Progress progress("layers", parts.layers());
  for (int64_t i = 0; i < parts.layers(); ++i) {
    progress.at(i);
    ConvertedLayer plain;
    plain.index = i;
    HeadTaps taps;
    LINNET_TRY(parts.block(plain, x, y, nullptr, parts.converts(i) ? &taps : nullptr));
    x.swap(y);
    if (!parts.converts(i)) continue;
    std::vector<HeadStatistics> heads;
    LINNET_TRY(head_statistics(taps, i, parts.causal(), options, heads));
    out.insert(out.end(), heads.begin(), heads.end());
  }
  return {};
}

int analyze_model(const Arguments& args) {
  Model model;
  std::vector<HeadStatistics> heads;
  HeadOptions options;
  int64_t length = 0;
  if (const Status status = load_model("analyze", args, model); !status.ok()) return fail(status);
  if (const Status status = heads_of(args, model, heads, options, length); !status.ok()) return fail(status);
  std::vector<Column> columns = {{"layer", Align::right}, {"head", Align::right}};
  for (const char* name : {"entropy", "entropy_ratio", "distance", "sink_mass", "stable_rank"})
    columns.push_back({name, Align::right});
  for (const int64_t w : options.windows) columns.push_back({"window_" + std::to_string(w), Align::right});
  Table table(columns);
  JsonWriter json(1);
  json.begin_object().member("model", model.summary().path).member("tokens", length).key("heads").begin_array();
  std::string csv;
  for (const Column& column : columns) csv += (csv.empty() ? "" : ",") + column.title;
  for (const HeadStatistics& h : heads) {
    std::vector<double> values = {h.entropy, h.entropy_ratio, h.distance, h.sink_mass, h.stable_rank};
    values.insert(values.end(), h.window_mass.begin(), h.window_mass.end());
    std::vector<std::string> row = {std::to_string(h.layer), std::to_string(h.head)};
    csv += "\n" + row[0] + "," + row[1];
    json.begin_object().member("layer", h.layer).member("head", h.head);
    for (size_t i = 0; i < values.size(); ++i) {
      row.push_back(number(values[i], 4));
      csv += "," + number(values[i], 9);
      json.member(columns[i + 2].title, values[i]);
    }
    json.end_object();
    table.row(row);
  }
  if (args.has("json")) {
    std::printf("%s\n", json.end_array().end_object().text().c_str());
  } else if (args.has("csv")) {
    std::printf("%s\n", csv.c_str());
  } else {
    table.print(stdout);
    if (model.summary().images) std::printf("\nmeasured on a random image\n");
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
      .summary = "mixers as dynamical systems (dsf), and what one layer can learn in context (icl); table and HTML page",
      .usage = "dsf [MIXER ...] [option=value ...] | icl [FORMULA ...] [option=value ...] | MODEL --text FILE",
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
          "  linnet analyze icl drift_attention drift_h3 drift=0.9\n\n"
          "A model (a folder or a GGUF file) with a text: what each attention head does there: entropy, distance, mass on "
          "windows "
          "and\n"
          "first keys, stable rank; the table that linnet convert plans with.\n\n"
          "  linnet analyze model.gguf --text text.txt --csv > heads.csv",
      .options = {{"tokens", "N", "random tokens (default 64, at most 2048); a model: tokens of the text (default 2048)"},
                  {"keys", "N", "width of keys, or states of a channel (default 8)"},
                  {"values", "N", "width of values, or channels (default 4)"},
                  {"seed", "N", "of the random tokens (default 1)"},
                  {"window", "N", "of the local mass (default 16)"},
                  {"file", "FILE", "dsf: a vector file instead of random tokens; icl: Sx, Sb, Sb_new"},
                  {"batch", "N", "row of the file's batch (default 0)"},
                  {"head", "N", "head of the file (default 0)"},
                  {"out", "FILE", "dsf: write the tensors as safetensors"},
                  {"html", "FILE", "write one self-contained page with plots"},
                  {"text", "FILE", "a model: a UTF-8 text"},
                  {"sinks", "N", "a model: first keys (default 4)"},
                  {"weights", "KIND", "a model: f32, bf16, q8 or q4 (default: as in the file)"},
                  {"threads", "N", "a model: threads (default: one per core)"},
                  {"csv", "", "a model: print comma-separated values"},
                  {"json", "", "print JSON"}},
      .run = analyze_main,
  };
  return command;
}

}  // namespace linnet::cli
