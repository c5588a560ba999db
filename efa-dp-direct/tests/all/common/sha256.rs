//! SHA-256 (FIPS 180-4), for rings whose bytes the vectors give as a digest.

/// First 32 bits of the fractional parts of the `n`th roots of the first primes, which is where the constants come from.
fn root_bits<const N: usize>(root: impl Fn(f64) -> f64, exact: impl Fn(u128, u128) -> bool) -> [u32; N] {
    let mut primes = (2u128..).filter(|n| (2..*n).take_while(|d| d * d <= *n).all(|d| n % d != 0));
    core::array::from_fn(|_| {
        let prime = primes.next().expect("primes do not end");
        let mut scaled = (root(prime as f64) * 2f64.powi(32)) as u128;
        while exact(scaled + 1, prime) {
            scaled += 1;
        }
        while !exact(scaled, prime) {
            scaled -= 1;
        }
        scaled as u32
    })
}

pub fn sha256_hex(data: &[u8]) -> String {
    let k: [u32; 64] = root_bits(f64::cbrt, |x, p| x * x * x <= p << 96);
    let mut state: [u32; 8] = root_bits(f64::sqrt, |x, p| x * x <= p << 64);
    let mut message = data.to_vec();
    message.push(0x80);
    while message.len() % 64 != 56 {
        message.push(0);
    }
    message.extend((data.len() as u64 * 8).to_be_bytes());
    for block in message.chunks_exact(64) {
        let mut w = [0u32; 64];
        for (word, bytes) in w.iter_mut().zip(block.chunks_exact(4)) {
            *word = u32::from_be_bytes(bytes.try_into().expect("four bytes"));
        }
        for i in 16..64 {
            let s0 = w[i - 15].rotate_right(7) ^ w[i - 15].rotate_right(18) ^ (w[i - 15] >> 3);
            let s1 = w[i - 2].rotate_right(17) ^ w[i - 2].rotate_right(19) ^ (w[i - 2] >> 10);
            w[i] = w[i - 16].wrapping_add(s0).wrapping_add(w[i - 7]).wrapping_add(s1);
        }
        let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = state;
        for i in 0..64 {
            let s1 = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
            let ch = (e & f) ^ (!e & g);
            let t1 = h.wrapping_add(s1).wrapping_add(ch).wrapping_add(k[i]).wrapping_add(w[i]);
            let s0 = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
            let t2 = s0.wrapping_add((a & b) ^ (a & c) ^ (b & c));
            (h, g, f, e, d, c, b, a) = (g, f, e, d.wrapping_add(t1), c, b, a, t1.wrapping_add(t2));
        }
        for (sum, value) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
            *sum = sum.wrapping_add(value);
        }
    }
    state.iter().map(|word| format!("{word:08x}")).collect()
}
