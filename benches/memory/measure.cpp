#include "measure.h"

#include <algorithm>
#include <cstdio>

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

std::vector<double> interleave(const std::vector<Allocator*>& sides, int samples,
                               const std::function<double(Allocator&)>& sample) {
  std::vector<std::vector<double>> values(sides.size());
  for (int round = -1; round < samples; ++round) {
    for (size_t i = 0; i < sides.size(); ++i) {
      sides[i]->begin();
      double value = sample(*sides[i]);
      if (round >= 0) values[i].push_back(value);
    }
  }
  std::vector<double> medians;
  for (const std::vector<double>& of_side : values) medians.push_back(median(of_side));
  return medians;
}

void print_row(const char* operation, const std::string& what, double ours, double peer, const char* peer_name,
               const char* unit, Better better) {
  if (peer_name == nullptr) {
    std::printf(
        "{\"operation\": \"%s\", \"case\": \"%s\", \"ours\": %.6g, \"peer\": null, \"peer_name\": null, "
        "\"unit\": \"%s\", \"ratio\": null}\n",
        operation, what.c_str(), ours, unit);
    std::fprintf(stderr, "%-26s %-52s %10.4g %s\n", operation, what.c_str(), ours, unit);
  } else {
    double ratio = better == Better::kLower ? peer / ours : ours / peer;
    std::printf(
        "{\"operation\": \"%s\", \"case\": \"%s\", \"ours\": %.6g, \"peer\": %.6g, \"peer_name\": \"%s\", "
        "\"unit\": \"%s\", \"ratio\": %.4g}\n",
        operation, what.c_str(), ours, peer, peer_name, unit, ratio);
    std::fprintf(stderr, "%-26s %-52s %10.4g %-8s peer %10.4g  ratio %8.3g  (%s)\n", operation, what.c_str(), ours,
                 unit, peer, ratio, peer_name);
  }
  std::fflush(stdout);
}

void print_rows(const char* operation, const std::string& what, const std::vector<Allocator*>& sides,
                const std::vector<double>& values, const char* unit, Better better) {
  for (size_t i = 1; i < sides.size(); ++i) {
    print_row(operation, what, values[0], values[i], sides[i]->name(), unit, better);
  }
}
