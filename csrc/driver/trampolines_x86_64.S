// Trampolines for x86-64 (System V ABI). Each loads its table index and enters nvb_driver_call, which forwards every
// way an argument can travel: six general registers, eight vector registers (cuParamSetf takes a float) and
// 64 bytes of stack (cuLaunchKernel's last five, cuIpcOpenMemHandle's 64-byte handle by value). A call, not a jump,
// because the driver's status is checked on the way back.
#define NVB_STACK_ARGUMENT_BYTES 64

  .text

  .type nvb_driver_call, @function
nvb_driver_call:
  .cfi_startproc
  push %rbp
  .cfi_def_cfa_offset 16
  .cfi_offset %rbp, -16
  mov %rsp, %rbp
  .cfi_def_cfa_register %rbp
  lea nvb_driver_table(%rip), %rax
  mov (%rax,%r11,8), %rax
  test %rax, %rax
  jnz 1f

  // First use: find the function with the argument registers kept aside.
  push %rdi
  push %rsi
  push %rdx
  push %rcx
  push %r8
  push %r9
  sub $128, %rsp
  movups %xmm0, (%rsp)
  movups %xmm1, 16(%rsp)
  movups %xmm2, 32(%rsp)
  movups %xmm3, 48(%rsp)
  movups %xmm4, 64(%rsp)
  movups %xmm5, 80(%rsp)
  movups %xmm6, 96(%rsp)
  movups %xmm7, 112(%rsp)
  mov %r11d, %edi
  call nvb_driver_resolve
  movups (%rsp), %xmm0
  movups 16(%rsp), %xmm1
  movups 32(%rsp), %xmm2
  movups 48(%rsp), %xmm3
  movups 64(%rsp), %xmm4
  movups 80(%rsp), %xmm5
  movups 96(%rsp), %xmm6
  movups 112(%rsp), %xmm7
  add $128, %rsp
  pop %r9
  pop %r8
  pop %rcx
  pop %rdx
  pop %rsi
  pop %rdi

1:  // Call it with the caller's stack arguments, which start above the return address.
  sub $NVB_STACK_ARGUMENT_BYTES, %rsp
  movups 16(%rbp), %xmm8
  movups 32(%rbp), %xmm9
  movups 48(%rbp), %xmm10
  movups 64(%rbp), %xmm11
  movups %xmm8, (%rsp)
  movups %xmm9, 16(%rsp)
  movups %xmm10, 32(%rsp)
  movups %xmm11, 48(%rsp)
  call *%rax
  mov %eax, %edi
  call nvb_driver_status
  leave
  .cfi_def_cfa %rsp, 8
  ret
  .cfi_endproc
  .size nvb_driver_call, . - nvb_driver_call

.macro TRAMPOLINE index, name
  .globl \name
  .hidden \name
  .type \name, @function
\name:
  .cfi_startproc
  mov $\index, %r11d
  jmp nvb_driver_call
  .cfi_endproc
  .size \name, . - \name
.endm

#define NVB_DRIVER_SYMBOL(index, name) TRAMPOLINE index, name
#include "symbols.h"

  .section .note.GNU-stack, "", @progbits
