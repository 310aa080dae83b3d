#include "measure.h"

#include <algorithm>
#include <cstdio>

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

Medians interleave(const std::vector<Allocator*>& sides, int samples, const std::function<double(Allocator&)>& sample) {
  std::vector<std::vector<double>> values(sides.size()), quotients(sides.size());
  for (int round = -1; round < samples; ++round) {
    for (size_t i = 0; i < sides.size(); ++i) {
      sides[i]->begin();
      double value = sample(*sides[i]);
      if (round < 0) continue;
      values[i].push_back(value);
      quotients[i].push_back(value / values[0].back());
    }
  }
  Medians medians;
  for (size_t i = 0; i < sides.size(); ++i) {
    medians.values.push_back(median(values[i]));
    medians.quotients.push_back(median(quotients[i]));
  }
  return medians;
}

namespace {

void print_row(const char* operation, const std::string& what, double ours, double peer, double quotient,
               const char* peer_name, const char* unit, Better better, bool of_rounds) {
  double ratio = better == Better::kLower ? quotient : 1 / quotient;
  std::printf(
      "{\"operation\": \"%s\", \"case\": \"%s\", \"ours\": %.6g, \"peer\": %.6g, \"peer_name\": \"%s\", "
      "\"unit\": \"%s\", \"ratio\": %.4g%s}\n",
      operation, what.c_str(), ours, peer, peer_name, unit, ratio, of_rounds ? ", \"ratio_of\": \"rounds\"" : "");
  std::fprintf(stderr, "%-26s %-52s %10.4g %-8s peer %10.4g  ratio %8.3g  (%s)\n", operation, what.c_str(), ours, unit,
               peer, ratio, peer_name);
  std::fflush(stdout);
}

}  // namespace

void print_rows(const char* operation, const std::string& what, const std::vector<Allocator*>& sides,
                const std::vector<double>& values, const char* unit, Better better) {
  Medians medians{values, values, false};
  for (double& quotient : medians.quotients) quotient /= values[0];
  print_rows(operation, what, sides, medians, unit, better);
}

void print_rows(const char* operation, const std::string& what, const std::vector<Allocator*>& sides,
                const Medians& medians, const char* unit, Better better) {
  for (size_t i = 1; i < sides.size(); ++i) {
    print_row(operation, what, medians.values[0], medians.values[i], medians.quotients[i], sides[i]->name(), unit,
              better, medians.of_rounds);
  }
}
