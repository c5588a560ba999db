//! Declares wire structs with emit and parse next to their layout, and bit fields with named bits.

/// A fixed number of bytes on the wire. Slices passed to it are exactly that long; only this crate calls it.
pub(crate) trait Wire: Copy {
    /// All bytes zero.
    const ZERO: Self;
    /// Writes every byte of `out`.
    fn emit(&self, out: &mut [u8]);
    /// Reads the value that `from` holds; every bit pattern is valid.
    fn parse(from: &[u8]) -> Self;
}

macro_rules! wire_int {
    ($($ty:ty),*) => {$(
        impl Wire for $ty {
            const ZERO: Self = 0;
            #[inline(always)]
            fn emit(&self, out: &mut [u8]) {
                out.copy_from_slice(&self.to_le_bytes());
            }
            #[inline(always)]
            fn parse(from: &[u8]) -> Self {
                let mut bytes = [0; size_of::<$ty>()];
                bytes.copy_from_slice(from);
                <$ty>::from_le_bytes(bytes)
            }
        }
    )*};
}
wire_int!(u8, u16, u32, u64);

impl<T: Wire, const N: usize> Wire for [T; N] {
    const ZERO: Self = [T::ZERO; N];
    #[inline(always)]
    fn emit(&self, out: &mut [u8]) {
        for (value, chunk) in self.iter().zip(out.chunks_exact_mut(size_of::<T>())) {
            value.emit(chunk);
        }
    }
    #[inline(always)]
    fn parse(from: &[u8]) -> Self {
        let mut values = Self::ZERO;
        for (value, chunk) in values.iter_mut().zip(from.chunks_exact(size_of::<T>())) {
            *value = T::parse(chunk);
        }
        values
    }
}

/// Defines a `repr(C)` struct without padding, its pinned layout, and its bytes.
macro_rules! wire_struct {
    (
        $(#[$attr:meta])*
        $name:ident, size $size:literal, align $align:literal $(aligned $repr:literal)?;
        $($(#[$field_attr:meta])* $field:ident: $ty:ty = $offset:literal,)*
    ) => {
        $(#[$attr])*
        #[repr(C $(, align($repr))?)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub struct $name {
            $($(#[$field_attr])* pub $field: $ty,)*
        }
        $crate::assert_layout!($name, size $size, align $align, { $($field @ $offset),* });

        impl $name {
            /// All bytes zero.
            pub const ZERO: Self = <Self as $crate::wire::macros::Wire>::ZERO;
            /// Number of bytes on the wire.
            pub const SIZE: usize = $size;

            /// Returns the bytes of this value.
            #[inline(always)]
            pub fn to_bytes(&self) -> [u8; $size] {
                let mut out = [0; $size];
                $crate::wire::macros::Wire::emit(self, &mut out);
                out
            }

            /// Returns the value that `bytes` hold; every bit pattern is valid.
            #[inline(always)]
            pub fn from_bytes(bytes: &[u8; $size]) -> Self {
                $crate::wire::macros::Wire::parse(bytes)
            }
        }

        impl $crate::wire::macros::Wire for $name {
            const ZERO: Self = Self { $($field: <$ty as $crate::wire::macros::Wire>::ZERO),* };
            #[inline(always)]
            fn emit(&self, out: &mut [u8]) {
                $($crate::wire::macros::Wire::emit(&self.$field, &mut out[$offset..$offset + size_of::<$ty>()]);)*
            }
            #[inline(always)]
            fn parse(from: &[u8]) -> Self {
                Self { $($field: $crate::wire::macros::Wire::parse(&from[$offset..$offset + size_of::<$ty>()])),* }
            }
        }

        impl Default for $name {
            #[inline(always)]
            fn default() -> Self {
                Self::ZERO
            }
        }
    };
}

/// Defines an integer with named bits: for each field a mask, a reader, and a writer that returns the changed value.
macro_rules! bit_field {
    (
        $(#[$attr:meta])*
        $name:ident($int:ty);
        $($(#[$field_attr:meta])* $kind:ident $mask:ident, $get:ident, $with:ident = $bits:literal;)*
    ) => {
        $(#[$attr])*
        #[repr(transparent)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        pub struct $name(pub $int);

        impl $name {
            /// Bits that no field names; they must be zero.
            pub const RESERVED: $int = !(0 $(| $bits)*);

            $($crate::wire::macros::bit_accessors!($kind $int, $mask, $get, $with, $bits, $(#[$field_attr])*);)*
        }

        impl $crate::wire::macros::Wire for $name {
            const ZERO: Self = Self(0);
            #[inline(always)]
            fn emit(&self, out: &mut [u8]) {
                $crate::wire::macros::Wire::emit(&self.0, out);
            }
            #[inline(always)]
            fn parse(from: &[u8]) -> Self {
                Self($crate::wire::macros::Wire::parse(from))
            }
        }
    };
}

macro_rules! bit_accessors {
    (flag $int:ty, $mask:ident, $get:ident, $with:ident, $bits:literal, $(#[$attr:meta])*) => {
        #[doc = concat!("Mask of [`Self::", stringify!($get), "`].")]
        pub const $mask: $int = $bits;

        $(#[$attr])*
        #[inline(always)]
        pub const fn $get(self) -> bool {
            self.0 & $bits != 0
        }

        #[doc = concat!("Returns this value with [`Self::", stringify!($get), "`] replaced.")]
        #[inline(always)]
        #[must_use]
        pub const fn $with(self, value: bool) -> Self {
            Self((self.0 & !$bits) | ((value as $int) * $bits))
        }
    };
    (field $int:ty, $mask:ident, $get:ident, $with:ident, $bits:literal, $(#[$attr:meta])*) => {
        #[doc = concat!("Mask of [`Self::", stringify!($get), "`].")]
        pub const $mask: $int = $bits;

        $(#[$attr])*
        #[inline(always)]
        pub const fn $get(self) -> $int {
            (self.0 & Self::$mask) >> Self::$mask.trailing_zeros()
        }

        #[doc = concat!("Returns this value with [`Self::", stringify!($get), "`] replaced; bits that don't fit are dropped.")]
        #[inline(always)]
        #[must_use]
        pub const fn $with(self, value: $int) -> Self {
            Self((self.0 & !Self::$mask) | ((value << Self::$mask.trailing_zeros()) & Self::$mask))
        }
    };
}

pub(crate) use {bit_accessors, bit_field, wire_struct};
