//! What the library tells of the fake driver's devices: their description, their rank, and which reaches which.

use crate::child::{in_child, Outcome};
use crate::engine::{call, create_backend, versioned, Failure};
use crate::fake::{Fake, Setting};
use crate::sweep::expect_clean;
use nvbackend::capi::device::*;
use nvbackend::capi::environment::*;
use nvbackend::capi::hardware::*;
use nvbackend::capi::status::*;
use std::ffi::{c_char, CStr};
use std::path::Path;

fn passes(check: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    in_child(|| check().map(|()| Outcome::Passed)).map(drop)
}

fn text(field: &[c_char]) -> &str {
    // SAFETY: fixed-size texts of the C ABI end with NUL.
    unsafe { CStr::from_ptr(field.as_ptr()) }.to_str().unwrap()
}

fn expect<T: PartialEq + std::fmt::Debug>(what: &str, found: T, wanted: T) -> Result<(), String> {
    if found == wanted {
        return Ok(());
    }
    Err(format!("{what} is {found:?}, not {wanted:?}"))
}

fn describe(index: u32) -> Result<nvb_device_info, Failure> {
    let mut info: nvb_device_info = versioned();
    call!(nvb_hardware_get_device_info(index, &mut info)).map(|()| info)
}

fn first_for(workload: u32) -> Result<nvb_recommendation, Failure> {
    let mut first: nvb_recommendation = versioned();
    call!(nvb_hardware_recommend(workload, 0, &mut first)).map(|()| first)
}

/// Two GPUs and the CPU, described without a context on either.
pub fn devices(file: &Path) -> Result<String, String> {
    passes(|| {
        let fake = Fake::open(file);
        fake.set(Setting::Devices, 2);
        let info = describe(1).map_err(|failure| failure.to_string())?;
        expect("the name", text(&info.name), "Fake GPU 1")?;
        expect("the UUID", text(&info.uuid), "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f")?;
        expect("the PCI place", text(&info.pci_bus_id), "0000:0f:00.0")?;
        expect("the architecture", text(&info.architecture), "Hopper")?;
        expect("the obstacle", text(&info.obstacle), "")?;
        expect("the bandwidth", info.peak_bandwidth, 2 * 2_619_000_000 * 640)?;
        expect("the clock", info.clock_mhz, 1980)?;
        let expected = NVB_FEATURE_BF16
            | NVB_FEATURE_FP8
            | NVB_FEATURE_TMA
            | NVB_FEATURE_MEMORY_POOLS
            | NVB_FEATURE_MANAGED_MEMORY
            | NVB_FEATURE_VIRTUAL_MEMORY;
        expect("the features", info.features & (expected | NVB_FEATURE_INTEGRATED), expected)?;

        let rank = |workload| first_for(workload).map_err(|failure| failure.to_string());
        let decode = rank(NVB_WORKLOAD_DECODE)?;
        expect("the first device for decoding", (text(&decode.device), decode.runnable), ("cuda:0", 1))?;
        expect("the first device for tests", text(&rank(NVB_WORKLOAD_TEST)?.device), "cpu")?;

        let mut environment: nvb_environment = versioned();
        call!(nvb_hardware_get_environment(&mut environment)).map_err(|failure| failure.to_string())?;
        expect("the driver's version", environment.driver_version, 13000)?;
        let mut library: nvb_library = versioned();
        call!(nvb_hardware_get_library(0, &mut library)).map_err(|failure| failure.to_string())?;
        let place = file.canonicalize().map_err(|error| error.to_string())?;
        expect("the driver's file", text(&library.path), place.to_str().unwrap())?;
        expect_clean(fake, 0)
    })?;
    passes(|| {
        let fake = Fake::open(file);
        fake.set(Setting::Capability, 61);
        let info = describe(0).map_err(|failure| failure.to_string())?;
        if !text(&info.obstacle).contains("compute capability 6.1") {
            return Err(format!("the obstacle is {:?}", text(&info.obstacle)));
        }
        let decode = first_for(NVB_WORKLOAD_DECODE).map_err(|failure| failure.to_string())?;
        expect("whether the old GPU can run", decode.runnable, 0)
    })?;
    Ok("two GPUs, and one that is too old".to_owned())
}

/// Devices without a link are named, and nothing of the attempt is left.
pub fn unreachable_peers(file: &Path) -> Result<String, String> {
    passes(|| {
        let fake = Fake::open(file);
        fake.set(Setting::Devices, 2);
        fake.set(Setting::Peers, 0);
        let created = [c"cuda:0", c"cuda:1", c"cpu"].map(create_backend);
        let [Ok(first), Ok(second), Ok(cpu)] = created else { return Err("a backend is missing".to_owned()) };
        for peer in [&second, &cpu] {
            match call!(nvb_backend_enable_peer_access(first.raw, peer.raw)) {
                Err(failure) if failure.status == NVB_ERROR_UNSUPPORTED && failure.text.contains("host memory") => {}
                other => return Err(format!("{other:?}")),
            }
        }
        call!(nvb_backend_enable_peer_access(first.raw, first.raw)).map_err(|failure| failure.to_string())?;
        let mut access: nvb_peer_access = versioned();
        call!(nvb_hardware_get_peer_access(0, 1, &mut access)).map_err(|failure| failure.to_string())?;
        expect("access", (access.accessible, access.native_atomics), (0, 0))?;
        match call!(nvb_hardware_get_peer_access(0, 2, &mut access)) {
            Err(failure) if failure.status == NVB_ERROR_DEVICE && failure.text.contains("machine has 2") => {}
            other => return Err(format!("a third device: {other:?}")),
        }
        drop((first, second, cpu));
        expect_clean(fake, 0)
    })?;
    Ok("two GPUs without a link".to_owned())
}
