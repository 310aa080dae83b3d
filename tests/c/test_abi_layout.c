// The C compiler lays the public structs out as Rust does: compiling this file is the test.
#include "abi_layout.h"

int main(void) {
  return 0;
}
