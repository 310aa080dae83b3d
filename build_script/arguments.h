// What build_script/arguments.rs asks of the host compiler about csrc's headers, and the little of the CUDA runtime
// that those headers name, so that the check needs no toolkit.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <type_traits>

typedef struct CUstream_st* cudaStream_t;
enum cudaError : int {};
typedef cudaError cudaError_t;

namespace mirror {

// Whether a value of Rust's type can stand for one of the header's: the same type; a pointer to what Rust leaves
// unnamed, with the same right to write; the number of an enum.
template <typename Rust, typename Header>
constexpr bool is_same() {
  if constexpr (std::is_pointer_v<Rust> && std::is_pointer_v<Header>) {
    using From = std::remove_pointer_t<Rust>;
    using To = std::remove_pointer_t<Header>;
    return std::is_same_v<From, To> || (std::is_void_v<From> && std::is_const_v<From> == std::is_const_v<To>);
  } else if constexpr (std::is_enum_v<Header>) {
    return std::is_integral_v<Rust> && sizeof(Rust) == sizeof(Header);
  } else {
    return std::is_same_v<Rust, Header>;
  }
}

// Compares the signature that Rust declares with the header's.
template <typename Header>
struct Function;

template <typename Result, typename... Arguments>
struct Function<Result(Arguments...)> {
  static constexpr bool kMayThrow = true;

  template <typename RustResult, typename... RustArguments>
  static constexpr bool is_declared() {
    if constexpr (sizeof...(RustArguments) == sizeof...(Arguments)) {
      return is_same<RustResult, Result>() && (is_same<RustArguments, Arguments>() && ... && true);
    } else {
      return false;
    }
  }
};

template <typename Result, typename... Arguments>
struct Function<Result(Arguments...) noexcept> : Function<Result(Arguments...)> {
  static constexpr bool kMayThrow = false;
};

}  // namespace mirror
