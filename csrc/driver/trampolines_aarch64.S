// Trampolines for aarch64 (AAPCS64). Each loads its table index and enters nvb_driver_call, which forwards every way an
// argument can travel: eight general registers, eight vector registers (cuParamSetf takes a float) and 64 bytes
// of stack (cuLaunchKernel's last three). A call, not a jump, because the driver's status is checked on the way back.
#define NVB_STACK_ARGUMENT_BYTES 64

  .text

  .type nvb_driver_call, %function
nvb_driver_call:
  .cfi_startproc
  stp x29, x30, [sp, #-16]!
  .cfi_def_cfa_offset 16
  .cfi_offset 29, -16
  .cfi_offset 30, -8
  mov x29, sp
  .cfi_def_cfa_register 29
  adrp x16, nvb_driver_table
  add x16, x16, :lo12:nvb_driver_table
  add x16, x16, x15, lsl #3
  ldar x16, [x16]
  cbnz x16, 1f

  // First use: find the function with the argument registers kept aside.
  sub sp, sp, #192
  stp x0, x1, [sp]
  stp x2, x3, [sp, #16]
  stp x4, x5, [sp, #32]
  stp x6, x7, [sp, #48]
  stp q0, q1, [sp, #64]
  stp q2, q3, [sp, #96]
  stp q4, q5, [sp, #128]
  stp q6, q7, [sp, #160]
  mov w0, w15
  bl nvb_driver_resolve
  mov x16, x0
  ldp x0, x1, [sp]
  ldp x2, x3, [sp, #16]
  ldp x4, x5, [sp, #32]
  ldp x6, x7, [sp, #48]
  ldp q0, q1, [sp, #64]
  ldp q2, q3, [sp, #96]
  ldp q4, q5, [sp, #128]
  ldp q6, q7, [sp, #160]
  add sp, sp, #192

1:  // Call it with the caller's stack arguments, which start above the saved frame record.
  sub sp, sp, #NVB_STACK_ARGUMENT_BYTES
  ldp q16, q17, [x29, #16]
  ldp q18, q19, [x29, #48]
  stp q16, q17, [sp]
  stp q18, q19, [sp, #32]
  blr x16
  bl nvb_driver_status
  mov sp, x29
  ldp x29, x30, [sp], #16
  .cfi_def_cfa sp, 0
  .cfi_restore 29
  .cfi_restore 30
  ret
  .cfi_endproc
  .size nvb_driver_call, . - nvb_driver_call

.macro TRAMPOLINE index, name
  .globl \name
  .hidden \name
  .type \name, %function
\name:
  .cfi_startproc
  mov w15, #\index
  b nvb_driver_call
  .cfi_endproc
  .size \name, . - \name
.endm

#define NVB_DRIVER_SYMBOL(index, name) TRAMPOLINE index, name
#include "symbols.h"

  .section .note.GNU-stack, "", %progbits
