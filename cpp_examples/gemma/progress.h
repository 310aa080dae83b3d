// A bar on standard error while a large model loads. Nothing is drawn where standard error is no terminal.
#ifndef GEMMA_PROGRESS_H
#define GEMMA_PROGRESS_H

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>

namespace gemma {

class Progress {
 public:
  // Models of less than 256 MiB load before a bar could be read.
  explicit Progress(uint64_t total) : total_(total), shown_(total >= 256U << 20 && isatty(STDERR_FILENO) == 1) {}
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() {
    if (drawn_ >= 0) std::fputs("\r\x1b[K", stderr);
  }

  void add(uint64_t bytes) {
    done_ += bytes;
    const int percent = static_cast<int>(std::min<uint64_t>(100, done_ * 100 / std::max<uint64_t>(total_, 1)));
    if (!shown_ || percent == drawn_) return;
    drawn_ = percent;
    static const char bar[] = "########################################";  // 40 marks
    std::fprintf(stderr, "\rloading [%-40.*s] %3d %%", percent * 40 / 100, bar, percent);
  }

 private:
  uint64_t total_;
  uint64_t done_ = 0;
  bool shown_;
  int drawn_ = -1;
};

}  // namespace gemma

#endif  // GEMMA_PROGRESS_H
