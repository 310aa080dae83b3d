"""python -m nvbackend: prints where the parts lie, or what devices there are."""

import argparse

import nvbackend


def main():
    parser = argparse.ArgumentParser(prog="python -m nvbackend", description="libnvbackend " + nvbackend.version())
    parser.add_argument("--ggml", action="store_true", help="the plug-in's path, for GGML_BACKEND_PATH")
    parser.add_argument("--library", action="store_true", help="the library's path")
    parser.add_argument("--include", action="store_true", help="the folder of the headers")
    parser.add_argument("--prefix", action="store_true", help="the folder for CMAKE_PREFIX_PATH")
    parser.add_argument("--devices", action="store_true", help="the devices, and why there is no GPU")
    asked = parser.parse_args()
    if not any(vars(asked).values()):
        parser.print_help()
        return
    for wanted, answer in [(asked.ggml, nvbackend.ggml_plugin), (asked.library, nvbackend.library),
                           (asked.include, nvbackend.include_folder), (asked.prefix, nvbackend.prefix)]:
        if wanted:
            print(answer())
    if asked.devices:
        print(*nvbackend.devices(), sep="\n")
        if reason := nvbackend.obstacle():
            print(f"no GPU: {reason}")


if __name__ == "__main__":
    main()
