// A deliberate fault: one byte past a block. The test passes when AddressSanitizer ends the program for it, which
// proves that the tests beside it are watched.
#include <stdlib.h>

int main(int argc, char** argv) {
  (void)argv;
  volatile char* block = malloc(16);
  if (block == NULL) return 0;
  block[15 + argc] = 1;
  free((void*)block);
  return 0;
}
