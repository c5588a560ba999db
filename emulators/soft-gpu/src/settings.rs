//! The settings: environment variables that cuInit reads.

use std::time::Duration;

/// The most devices there can be.
pub(crate) const MAX_DEVICES: usize = 16;

/// The values of the `SOFTGPU_*` variables.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Settings {
    /// `SOFTGPU_DEVICES`.
    pub(crate) devices: usize,
    /// `SOFTGPU_MEMORY_BYTES`, a multiple of 2 MiB.
    pub(crate) memory: u64,
    /// `SOFTGPU_CAPABILITY`.
    pub(crate) capability: (i32, i32),
    /// `SOFTGPU_NAME`.
    pub(crate) name: String,
    /// `SOFTGPU_SEED`.
    pub(crate) seed: u64,
    /// `SOFTGPU_MEMORY=weak`.
    pub(crate) weak: bool,
    /// `SOFTGPU_CPU_ACCESS=no`.
    pub(crate) hidden: bool,
    /// `SOFTGPU_WATCHDOG`.
    pub(crate) watchdog: Option<Duration>,
    /// `SOFTGPU_CHECK_POSTS=yes`.
    pub(crate) checks_posts: bool,
}

/// The variables, and what each may be set to.
const NAMES: [(&str, &str); 9] = [
    ("SOFTGPU_DEVICES", "a number from 0 to 16"),
    ("SOFTGPU_MEMORY_BYTES", "a number of bytes from 2097152 (2 MiB)"),
    ("SOFTGPU_CAPABILITY", "a compute capability from 7.0 to 12.1, as 9.0"),
    ("SOFTGPU_NAME", "a text of 1 to 200 bytes"),
    ("SOFTGPU_SEED", "a number"),
    ("SOFTGPU_MEMORY", "strong or weak"),
    ("SOFTGPU_CHECK_POSTS", "yes or no"),
    ("SOFTGPU_CPU_ACCESS", "yes or no"),
    ("SOFTGPU_WATCHDOG", "a number of seconds, where 0 means no limit"),
];

impl Settings {
    /// Reads this process's settings.
    ///
    /// # Errors
    /// A line for the user: the variable and what it may be set to.
    pub(crate) fn from_env() -> Result<Self, String> {
        for (name, _) in std::env::vars_os() {
            let name = name.to_string_lossy();
            if name.starts_with("SOFTGPU_") && NAMES.iter().all(|known| known.0 != name) {
                let known = NAMES.map(|known| known.0).join(", ");
                return Err(format!("{name} is not a setting: the settings are {known}"));
            }
        }
        Self::read(|name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned()))
    }

    fn read(value: impl Fn(&str) -> Option<String>) -> Result<Self, String> {
        let one = |name: &str| value(name).filter(|text| !text.is_empty());
        let refused = |name: &str, text: &str| {
            let may = NAMES.iter().find(|known| known.0 == name).map_or("", |known| known.1);
            format!("{name}={text} is not valid: it must be {may}")
        };
        let number = |name: &str, usual: u64, valid: &dyn Fn(u64) -> bool| match one(name) {
            None => Ok(usual),
            Some(text) => text.parse().ok().filter(|value| valid(*value)).ok_or_else(|| refused(name, &text)),
        };
        const UNIT: u64 = crate::memfd::GRANULARITY as u64;
        let capability = one("SOFTGPU_CAPABILITY").unwrap_or_else(|| "9.0".to_owned());
        let parts =
            capability.split_once('.').and_then(|(major, minor)| Some((major.parse().ok()?, minor.parse().ok()?)));
        let name = one("SOFTGPU_NAME").unwrap_or_else(|| "ferrogin software GPU".to_owned());
        if name.len() > 200 {
            return Err(refused("SOFTGPU_NAME", &name));
        }
        let memory = one("SOFTGPU_MEMORY").unwrap_or_else(|| "strong".to_owned());
        if memory != "strong" && memory != "weak" {
            return Err(refused("SOFTGPU_MEMORY", &memory));
        }
        let yes = |name: &str, usual: bool| match one(name).as_deref() {
            None => Ok(usual),
            Some("yes") => Ok(true),
            Some("no") => Ok(false),
            Some(text) => Err(refused(name, text)),
        };
        let watchdog = number("SOFTGPU_WATCHDOG", 0, &|_| true)?;
        Ok(Self {
            devices: number("SOFTGPU_DEVICES", 1, &|value| value <= MAX_DEVICES as u64)? as usize,
            memory: number("SOFTGPU_MEMORY_BYTES", 16 << 30, &|value| (UNIT..1 << 46).contains(&value))? / UNIT * UNIT,
            capability: parts
                .filter(|parts| ((7, 0)..=(12, 1)).contains(parts) && (0..10).contains(&parts.1))
                .ok_or_else(|| refused("SOFTGPU_CAPABILITY", &capability))?,
            name,
            seed: number("SOFTGPU_SEED", 0, &|_| true)?,
            weak: memory == "weak",
            hidden: !yes("SOFTGPU_CPU_ACCESS", true)?,
            watchdog: (watchdog > 0).then(|| Duration::from_secs(watchdog)),
            checks_posts: yes("SOFTGPU_CHECK_POSTS", false)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(name: &str, text: &str) -> Result<Settings, String> {
        Settings::read(|asked| (asked == name).then(|| text.to_owned()))
    }

    #[test]
    fn settings_are_read() {
        let usual = Settings::read(|_| None).unwrap();
        assert_eq!((usual.devices, usual.memory, usual.capability), (1, 16 << 30, (9, 0)));
        assert_eq!((usual.weak, usual.hidden, usual.checks_posts), (false, false, false));
        assert_eq!((usual.watchdog, usual.seed), (None, 0));
        assert!(with("SOFTGPU_CPU_ACCESS", "no").unwrap().hidden);
        assert!(with("SOFTGPU_CHECK_POSTS", "yes").unwrap().checks_posts);
        assert_eq!(with("SOFTGPU_DEVICES", "8").unwrap().devices, 8);
        assert_eq!(with("SOFTGPU_MEMORY_BYTES", "5000000").unwrap().memory, 4 << 20);
        assert_eq!(with("SOFTGPU_CAPABILITY", "10.3").unwrap().capability, (10, 3));
        assert!(with("SOFTGPU_MEMORY", "weak").unwrap().weak);
        assert_eq!(with("SOFTGPU_WATCHDOG", "3").unwrap().watchdog, Some(Duration::from_secs(3)));
    }

    #[test]
    fn invalid_settings_are_named() {
        for (name, text) in [
            ("SOFTGPU_DEVICES", "17"),
            ("SOFTGPU_DEVICES", "two"),
            ("SOFTGPU_MEMORY_BYTES", "100"),
            ("SOFTGPU_MEMORY_BYTES", "99999999999999999999"),
            ("SOFTGPU_CAPABILITY", "9"),
            ("SOFTGPU_CAPABILITY", "3.5"),
            ("SOFTGPU_CAPABILITY", "9.10"),
            ("SOFTGPU_MEMORY", "slow"),
            ("SOFTGPU_CPU_ACCESS", "maybe"),
            ("SOFTGPU_CHECK_POSTS", "1"),
            ("SOFTGPU_WATCHDOG", "-1"),
            ("SOFTGPU_SEED", "x"),
        ] {
            let error = with(name, text).unwrap_err();
            assert!(error.starts_with(&format!("{name}={text} is not valid: it must be ")), "{error}");
        }
    }
}
