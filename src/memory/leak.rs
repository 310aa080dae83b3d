//! Which blocks are live and where they came from: every block, or one in so many bytes.
//!
//! A record holds raw return addresses, which cost little to take; names are looked up when a report is written.

use super::options::LeakTracking;
use super::sync::{Mutex, MutexGuard};
use crate::allocation::collected;
use crate::error::Result;
use std::collections::{BTreeMap, HashMap};
use std::ffi::{c_int, c_void, CStr};
use std::fmt::{self, Write as _};
use std::sync::PoisonError;

/// Frames of a stack that are kept.
const FRAMES: usize = 32;
/// Callers in other threads take other locks.
const SHARDS: usize = 16;
/// Sites that a report lists.
const SITES: usize = 20;

struct Record {
    bytes: u64,
    nanoseconds: u64,
    frames: Box<[usize]>,
}

pub struct LeakTracker {
    mode: LeakTracking,
    shards: [Mutex<HashMap<usize, Record>>; SHARDS],
}

/// Live blocks that were allocated at one place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeakSite {
    pub blocks: u64,
    pub bytes: u64,
    /// The age of the oldest block.
    pub age_nanoseconds: u64,
    stack: Stack,
}

/// A stack as its owner sees it: the call of the library, and where it was made. How the call works inside is nobody's
/// business, and differs from one time to the next.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Stack {
    /// `None`: the library was not called through its C functions.
    call: Option<String>,
    frames: Vec<usize>,
}

impl Stack {
    fn new(frames: &[usize]) -> Stack {
        let frames: Vec<usize> = frames.iter().copied().take_while(|&frame| frame != 0).collect();
        let name = |&frame: &usize| Symbol::at(frame).name.filter(|name| name.starts_with("nvb_"));
        match frames.iter().enumerate().find_map(|(i, frame)| Some((i, name(frame)?))) {
            Some((i, name)) => Stack { call: Some(name), frames: frames[i + 1..].to_vec() },
            None => Stack { call: None, frames },
        }
    }
}

impl LeakSite {
    /// A line for each function, the innermost first.
    pub fn lines(&self) -> Vec<String> {
        let frames = self.stack.frames.iter().map(|&frame| Symbol::at(frame).to_string());
        self.stack.call.iter().cloned().chain(frames).collect()
    }
}

impl LeakTracker {
    pub fn new(mode: LeakTracking) -> LeakTracker {
        LeakTracker { mode, shards: std::array::from_fn(|_| Mutex::new(HashMap::new())) }
    }

    pub fn mode(&self) -> LeakTracking {
        self.mode
    }

    /// Bytes that a thread may allocate before its next sample.
    pub fn next_sample(&self) -> i64 {
        match self.mode {
            LeakTracking::Off => i64::MAX,
            LeakTracking::Full => 0,
            LeakTracking::Sampled(bytes) => i64::try_from(bytes).unwrap_or(i64::MAX),
        }
    }

    fn shard(&self, address: usize) -> MutexGuard<'_, HashMap<usize, Record>> {
        // Blocks are 256 bytes apart at least.
        self.shards[(address >> 8) % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn allocated(&self, address: usize, bytes: u64, nanoseconds: u64) {
        let record = Record { bytes, nanoseconds, frames: return_addresses() };
        let mut records = self.shard(address);
        // A block that cannot be recorded is missing in reports.
        if records.try_reserve(1).is_ok() {
            records.insert(address, record);
        }
    }

    pub fn freed(&self, address: usize) {
        self.shard(address).remove(&address);
    }

    /// Live blocks by site, those with the most bytes first.
    pub fn sites(&self, now: u64) -> Result<Vec<LeakSite>> {
        let mut stacks: BTreeMap<Box<[usize]>, (u64, u64, u64)> = BTreeMap::new();
        for shard in &self.shards {
            for record in shard.lock().unwrap_or_else(PoisonError::into_inner).values() {
                let (blocks, bytes, age) = stacks.entry(record.frames.clone()).or_default();
                *blocks += 1;
                *bytes += record.bytes;
                *age = (*age).max(now.saturating_sub(record.nanoseconds));
            }
        }
        let mut sites: BTreeMap<Stack, LeakSite> = BTreeMap::new();
        for (frames, (blocks, bytes, age)) in stacks {
            let stack = Stack::new(&frames);
            let none = LeakSite { blocks: 0, bytes: 0, age_nanoseconds: 0, stack: stack.clone() };
            let site = sites.entry(stack).or_insert(none);
            site.blocks += blocks;
            site.bytes += bytes;
            site.age_nanoseconds = site.age_nanoseconds.max(age);
        }
        let mut sites: Vec<LeakSite> = collected(sites.into_values(), "the sites of live blocks")?;
        sites.sort_unstable_by(|a, b| b.bytes.cmp(&a.bytes).then(b.blocks.cmp(&a.blocks)).then(a.stack.cmp(&b.stack)));
        Ok(sites)
    }

    /// For people. `live` is what the counters say, since a sampling tracker does not know every block.
    pub fn report(&self, now: u64, live_blocks: u64, live_bytes: u64) -> Result<String> {
        let mut text = format!("{live_blocks} live blocks of {live_bytes} bytes");
        match self.mode {
            LeakTracking::Off => {
                text += "; leak tracking is off, so where they came from is not known\n";
                return Ok(text);
            }
            LeakTracking::Sampled(bytes) => writeln!(text, "; one allocation in about {bytes} bytes was recorded"),
            LeakTracking::Full => writeln!(text),
        }
        .expect("strings accept text");
        let sites = self.sites(now)?;
        for site in sites.iter().take(SITES) {
            let seconds = site.age_nanoseconds as f64 * 1e-9;
            writeln!(text, "{} bytes in {} blocks, oldest {seconds:.1} s, from", site.bytes, site.blocks)
                .expect("strings accept text");
            for line in site.lines() {
                writeln!(text, "    {line}").expect("strings accept text");
            }
        }
        if sites.len() > SITES {
            writeln!(text, "and {} more places", sites.len() - SITES).expect("strings accept text");
        }
        Ok(text)
    }
}

extern "C" {
    // libgcc_s or libunwind, which every Rust program is linked with.
    fn _Unwind_Backtrace(visit: extern "C" fn(*mut c_void, *mut c_void) -> c_int, argument: *mut c_void) -> c_int;
    fn _Unwind_GetIP(context: *mut c_void) -> usize;
}

struct Walk {
    frames: [usize; FRAMES],
    count: usize,
}

extern "C" fn visit(context: *mut c_void, walk: *mut c_void) -> c_int {
    const NO_REASON: c_int = 0;
    const END_OF_STACK: c_int = 5;
    // SAFETY: the argument that `return_addresses` passes on.
    let walk = unsafe { &mut *walk.cast::<Walk>() };
    if walk.count == FRAMES {
        return END_OF_STACK;
    }
    // SAFETY: the unwinder's own context.
    walk.frames[walk.count] = unsafe { _Unwind_GetIP(context) };
    walk.count += 1;
    NO_REASON
}

fn return_addresses() -> Box<[usize]> {
    let mut walk = Walk { frames: [0; FRAMES], count: 0 };
    // SAFETY: the callback writes into `walk` only, which outlives the call.
    unsafe { _Unwind_Backtrace(visit, (&mut walk as *mut Walk).cast()) };
    walk.frames[..walk.count].into()
}

/// What the dynamic linker knows of an address.
struct Symbol {
    address: usize,
    name: Option<String>,
    file: Option<String>,
    /// From the start of the symbol, or of the file if that has no name.
    offset: usize,
}

impl Symbol {
    fn at(address: usize) -> Symbol {
        // SAFETY: zero bytes are NULL pointers.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // A return address is that of the next instruction, which may belong to the next function.
        let call = address.wrapping_sub(1);
        // SAFETY: any address may be asked about.
        if unsafe { libc::dladdr(call as *const c_void, &mut info) } == 0 {
            return Symbol { address, name: None, file: None, offset: 0 };
        }
        // SAFETY: strings of the loaded object, or NULL.
        let text = |pointer: *const libc::c_char| {
            (!pointer.is_null()).then(|| unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
        };
        let (name, file) = (text(info.dli_sname), text(info.dli_fname));
        let start = if name.is_some() { info.dli_saddr } else { info.dli_fbase };
        Symbol { address, name, file, offset: call - start as usize }
    }
}

/// "function+offset (file)", or "file+offset", as `addr2line` takes it.
impl fmt::Display for Symbol {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.name, &self.file) {
            (Some(name), Some(file)) => write!(formatter, "{name}+{:#x} ({file})", self.offset),
            (None, Some(file)) => write!(formatter, "{file}+{:#x}", self.offset),
            _ => write!(formatter, "{:#x}", self.address),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn live_blocks_are_reported_by_site_and_freed_ones_are_not() {
        let tracker = LeakTracker::new(LeakTracking::Full);
        for i in 0..3 {
            tracker.allocated(0x1000 * (i + 1), 100, 5);
        }
        tracker.allocated(0x9000, 1, 6);
        tracker.freed(0x9000);
        let sites = tracker.sites(1_000_000_005).unwrap();
        assert_eq!(sites.len(), 1, "one loop, one place");
        assert_eq!((sites[0].blocks, sites[0].bytes, sites[0].age_nanoseconds), (3, 300, 1_000_000_000));
        let report = tracker.report(1_000_000_005, 3, 300).unwrap();
        assert!(
            report.starts_with("3 live blocks of 300 bytes\n300 bytes in 3 blocks, oldest 1.0 s, from\n    "),
            "{report}"
        );
    }
}
